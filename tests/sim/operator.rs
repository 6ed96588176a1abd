//! Who makes the run, and decides by hand what is to become of undeliverable units.

use std::rc::Rc;

use hedgerow::ids::ConsumerGroupId;
use hedgerow::queue::UnitId;
use hedgerow::store::sequencer::{Command, Look};
use tokio::sync::oneshot;

use crate::executor::Owner;
use crate::life::Life;
use crate::world::World;
use crate::{plan, tail, trainer, worker};

/// How long the operator waits between two looks, at most.
const LOOKS_MS: usize = 120_000;

/// Makes the run, then begins everybody else, then looks after undeliverable units.
pub(crate) fn begin(world: &Rc<World>, life: &Rc<Life>) {
    let (world, life) = (Rc::clone(world), Rc::clone(life));
    world.clone().spawner.spawn(Owner::Operator, async move {
        make_run(&world, &life).await;
        if life.draining.get() {
            return;
        }
        (0..world.character.workers).for_each(|number| worker::begin(&world, &life, number));
        for (group, of_group) in world.character.consumer_groups.iter().enumerate() {
            (0..of_group.members).for_each(|member| trainer::begin(&world, &life, group, member));
        }
        if world.character.tail {
            tail::begin(&world, &life);
        }
        life.begun.set(true);
        while !world.calm.get() && !life.draining.get() {
            world.sleep(world.below(LOOKS_MS) as u64).await;
            release(&world, &life).await;
        }
    });
}

/// What the sequencing task answers, once that is durable.
async fn ask<T>(life: &Life, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    life.store.command(command(reply)).await;
    let answer = answer.await.ok()?;
    let position = life.store.last_position();
    life.store.durable(position).await;
    life.answered(position.0);
    Some(answer)
}

async fn make_run(world: &World, life: &Life) {
    let settings = world.character.settings.clone();
    match ask(life, |reply| Command::CreateRun(plan::run(), settings, reply)).await {
        Some(Ok(facts)) => {
            let made = (facts.settings_version, facts.created_unix_ms);
            world.say("operator", format_args!("the run is there: {made:?}"));
            if world.run_is_made.replace(Some(made)).is_some_and(|before| before != made) {
                world.fail(format!("the run was made again: {made:?}"));
            }
        }
        Some(Err(refusal)) if !life.draining.get() => world.fail(format!("the run is refused: {refusal}")),
        Some(Err(_)) | None => {}
    }
}

/// Releases undeliverable units, or drops some for good.
pub(crate) async fn release(world: &World, life: &Life) {
    let looked = ask(life, |reply| Command::Look(Look::ConsumerGroups(plan::run(), None, 100, reply))).await;
    let Some(Ok((groups, _))) = looked else { return };
    for look in groups {
        let place = world.character.consumer_groups.iter().position(|group| group.name == look.name);
        for unit in look.undeliverable.0 {
            let drop = world.goes_wrong(4);
            world.say("operator", format_args!("{unit} of {}: drop {drop}", look.name));
            world.count(if drop { "dropped by hand" } else { "released by hand" }, 1);
            let applied = place.map(|place| &world.applied[place]);
            if let (true, Some(applied)) = (drop, applied) {
                applied.borrow_mut().drop_asked.insert(unit.clone());
            }
            let answer = decide(life, look.name.clone(), &unit, drop).await;
            if let (true, Some(Ok(())), Some(applied)) = (drop, answer, applied) {
                applied.borrow_mut().settle(&unit);
            }
        }
    }
}

async fn decide(
    life: &Life,
    consumer_group: ConsumerGroupId,
    unit: &str,
    drop: bool,
) -> Option<Result<(), hedgerow::error::Refusal>> {
    let (run, unit) = (plan::run(), UnitId::new(unit));
    ask(life, |reply| Command::ReleaseUnit { run, consumer_group, unit, drop, reply }).await
}
