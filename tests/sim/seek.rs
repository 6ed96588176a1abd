//! Checkpoints of consumer groups that the operator keeps, and goes back or forward to.
//!
//! What was answered to be acknowledged when a checkpoint was asked for is in it. So a group that was sought to it may give out all
//! else again, and nothing of that. Where it is not known whether a seek has come to pass, only what both ways have in common is
//! certain. What was asked to be acknowledged only later is not in it: whoever asks for it first after the seek is told that it is
//! acknowledged now, and not before.

use std::collections::{BTreeMap, BTreeSet};

use hedgerow::error::Reason;
use hedgerow::store::sequencer::Command;

use crate::life::Life;
use crate::operator::ask;
use crate::plan;
use crate::world::World;

/// Checkpoints that are kept at most; then one of them gives its place.
const KEPT_MAX: usize = 6;

/// A checkpoint that is kept.
pub(crate) struct Kept {
    group: usize,
    token: Vec<u8>,
    settled: BTreeMap<String, usize>,
    /// What had been asked to be acknowledged by then: more than that is not in it.
    asked: BTreeSet<String>,
}

/// Keeps a checkpoint of some consumer group.
pub(crate) async fn keep(world: &World, life: &Life) {
    let group = world.below(world.character.consumer_groups.len());
    let name = world.character.consumer_groups[group].name.clone();
    let settled = world.applied[group].borrow().settled().clone();
    let consumer_group = name.clone();
    let answer = ask(life, |reply| Command::Checkpoint { run: plan::run(), consumer_group, reply }).await;
    match answer {
        None => {}
        Some(Ok(facts)) => {
            world.say("operator", format_args!("keeps a checkpoint of {name}, {} units", facts.acknowledged_units));
            world.count("checkpoints kept", 1);
            let mut kept = world.checkpoints.borrow_mut();
            let asked = world.applied[group].borrow().asked();
            let checkpoint = Kept { group, token: facts.token, settled, asked };
            if kept.len() < KEPT_MAX {
                kept.push(checkpoint);
            } else {
                kept[world.below(KEPT_MAX)] = checkpoint;
            }
        }
        // A group that is made by who subscribes to it may not be there yet.
        Some(Err(refusal)) if refusal.reason == Reason::UnitNotFound => {}
        Some(Err(refusal)) => world.fail(format!("a checkpoint is refused: {refusal}")),
    }
}

/// Has a consumer group go to a checkpoint that was kept.
pub(crate) async fn seek(world: &World, life: &Life) {
    let (group, token, settled, asked) = {
        let kept = world.checkpoints.borrow();
        if kept.is_empty() {
            return;
        }
        let Kept { group, token, settled, asked } = &kept[world.below(kept.len())];
        (*group, token.clone(), settled.clone(), asked.clone())
    };
    let applied = &world.applied[group];
    let consumer_group = world.character.consumer_groups[group].name.clone();
    world.say("operator", format_args!("seeks {consumer_group}"));
    // From now on until it is answered, it may have come to pass.
    applied.borrow_mut().sought(|unit| settled.contains_key(unit));
    // Who subscribes again may ask before the answer is here.
    applied.borrow_mut().undo_all_but(&asked);
    let answer = ask(life, |reply| Command::Seek { run: plan::run(), consumer_group, token, reply }).await;
    match answer {
        None => {}
        Some(Ok(sought)) => {
            world.say("operator", format_args!("it is sought: {sought:?}"));
            world.count("seeks", 1);
            world.count("units restored by seeks", usize::try_from(sought.restored_units).unwrap_or(0));
            let mut applied = applied.borrow_mut();
            applied.sought(|_| false);
            settled.keys().for_each(|unit| applied.settle(unit));
            applied.is_undone();
        }
        Some(Err(refusal)) if refusal.reason == Reason::NotRetained => {
            world.say("operator", format_args!("it cannot be sought: {refusal}"));
            world.count("seeks refused", 1);
        }
        Some(Err(refusal)) => world.fail(format!("a seek is refused: {refusal}")),
    }
}
