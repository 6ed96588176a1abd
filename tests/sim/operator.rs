//! Who makes the run and changes its settings, makes another and deletes it, and decides by hand what is to become of
//! undeliverable units.

use std::rc::Rc;
use std::sync::Arc;

use hedgerow::ids::{ConsumerGroupId, RolloutRef};
use hedgerow::queue::UnitId;
use hedgerow::rollout::run_settings::RunSettings;
use hedgerow::store::report::Reply;
use hedgerow::store::sequencer::{Command, Look};
use tokio::sync::oneshot;

use crate::executor::Owner;
use crate::life::Life;
use crate::world::World;
use crate::{plan, seek, tail, trainer, worker};

/// How long the operator waits between two looks, at most.
const LOOKS_MS: [usize; 3] = [200, 3000, 120_000];

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
            world.wait(world.below(LOOKS_MS[world.below(LOOKS_MS.len())]) as u64).await;
            match world.below(if world.character.seeks { 10 } else { 6 }) {
                0 => change_settings(&world, &life).await,
                1 => fill_other_run(&world, &life).await,
                2 => delete_other_run(&world, &life).await,
                6..8 => seek::keep(&world, &life).await,
                8..10 => seek::seek(&world, &life).await,
                _ => release(&world, &life).await,
            }
        }
    });
}

/// What the sequencing task answers, once that is durable.
pub(crate) async fn ask<T>(life: &Life, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
    let (reply, answer) = oneshot::channel();
    life.store.command(command(reply)).await;
    let answer = answer.await.ok()?;
    let position = life.store.last_position();
    life.store.durable(position).await;
    life.answered(position.0);
    Some(answer)
}

/// A run's settings: their version, how long a lease lasts, and when the run was made.
type Settings = (u64, u64, u64);

/// What is known of the runs.
#[derive(Default)]
pub(crate) struct Runs {
    /// What was answered last of the settings, and what was asked since.
    settings: Option<Settings>,
    asked: Vec<Settings>,
    /// Whether the other run is there; none while that is not known.
    other: Option<bool>,
}

async fn make_run(world: &World, life: &Life) {
    let there = life.store.run(&plan::run()).map(|run| {
        let settings = run.settings.lock();
        (settings.0, settings.1.lease_ms, run.created_unix_ms)
    });
    let is_told = {
        let runs = world.runs.borrow();
        runs.settings.is_none() || there == runs.settings || there.is_some_and(|there| runs.asked.contains(&there))
    };
    let other = life.store.run(&plan::other_run()).is_some();
    if !is_told || world.runs.borrow().other.is_some_and(|known| known != other) {
        world.fail(format!("the run is {there:?}, and another is there: {other}"));
    }
    let settings = world.character.settings.clone();
    let made = match there {
        Some(there) => Some(there),
        None => match ask(life, |reply| Command::CreateRun(plan::run(), settings, reply)).await {
            Some(Ok(facts)) => Some((facts.settings_version, facts.settings.lease_ms, facts.created_unix_ms)),
            Some(Err(refusal)) if !life.draining.get() => return world.fail(format!("the run is refused: {refusal}")),
            Some(Err(_)) | None => None,
        },
    };
    world.say("operator", format_args!("the run is there: {made:?}"));
    let mut runs = world.runs.borrow_mut();
    (runs.settings, runs.asked) = (made, Vec::new());
}

/// Gives the run other settings: a lease that lasts a little longer.
async fn change_settings(world: &World, life: &Life) {
    let Some((version, lease_ms, created)) = world.runs.borrow().settings else { return };
    let settings = RunSettings { lease_ms: lease_ms + 1, ..(*world.character.settings).clone() };
    world.runs.borrow_mut().asked.push((version + 1, lease_ms + 1, created));
    let changed = ask(life, |reply| Command::UpdateRun(plan::run(), Arc::new(settings), version, reply)).await;
    if let Some(Ok(facts)) = changed {
        world.say("operator", format_args!("the settings are at {}", facts.settings_version));
        world.count("settings changed", 1);
        world.runs.borrow_mut().settings = Some((facts.settings_version, facts.settings.lease_ms, created));
    }
}

/// Makes another run, with rollouts that nobody takes.
async fn fill_other_run(world: &World, life: &Life) {
    world.runs.borrow_mut().other = None;
    for _ in 0..1 + world.below(6) {
        let request = &world.plan.requests[world.below(world.plan.requests.len())];
        let about = RolloutRef { run: plan::other_run(), ..request.about.clone() };
        let answer = life.store.report(None, &about, request.event.clone(), |_, _| ()).await;
        life.store.durable(answer.position).await;
        if matches!(answer.reply, Reply::Accepted(..)) {
            life.answered(answer.position.0);
            world.runs.borrow_mut().other = Some(true);
        }
    }
}

/// Deletes the other run with all that is in it.
pub(crate) async fn delete_other_run(world: &World, life: &Life) {
    world.runs.borrow_mut().other = None;
    let deleted = ask(life, |reply| Command::DeleteRun(plan::other_run(), true, reply)).await;
    world.say("operator", format_args!("the other run is deleted: {deleted:?}"));
    if deleted.is_some() {
        world.count("runs deleted", usize::from(matches!(deleted, Some(Ok(_)))));
        world.runs.borrow_mut().other = Some(false);
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
