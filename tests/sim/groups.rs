//! What must come of groups: who is counted, what their rewards come to by a slow model of its own, and that nobody is given half of
//! one. What was released is asked of the service; whether it may be so, and every number on every row, is worked out here.

use std::collections::{BTreeMap, BTreeSet};

use hedgerow::group::{DroppedFor, Estimator, GroupRules, Release, ReleasedFor};
use hedgerow::rollout::run_settings::{ConsumerGroupSettings, Unit};
use hedgerow::store::effect::Outcome;
use hedgerow::store::sequencer::{Command, GroupLook, Look};

use crate::check::{Standing, State};
use crate::drive::Field;
use crate::plan::run;
use crate::service::Row;
use crate::world::World;

/// The groups that are there, by id.
pub(crate) type Groups = BTreeMap<String, GroupLook>;

/// What a consumer group must have been given of a finalised rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    All,
    /// Its group is not released.
    Later,
    /// It is late, or its group was dropped.
    Nothing,
}

/// Asks for all groups.
pub(crate) fn ask(field: &mut Field) -> Groups {
    let page = field.ask(|reply| Command::Look(Look::Groups(run(), None, 1000, false, reply)));
    let (groups, _) = page.and_then(Result::ok).unwrap_or_default();
    groups.into_iter().map(|look| (look.group.to_string(), look)).collect()
}

fn rules(world: &World) -> GroupRules {
    world.character.settings.group_rules()
}

/// Whether a consumer group with these settings waits for the release of groups.
fn waits(world: &World, settings: &ConsumerGroupSettings) -> bool {
    rules(world).hold_all() || (rules(world).has_group_units && settings.unit == Unit::Group)
}

/// What a consumer group is given of a rollout.
pub(crate) fn given(world: &World, standing: &Standing, groups: &Groups, settings: &ConsumerGroupSettings) -> Given {
    let planned = &world.plan.rollouts[standing.rollout];
    let Some(look) = planned.group.as_ref().and_then(|group| groups.get(group)).filter(|_| waits(world, settings))
    else {
        return Given::All;
    };
    match &look.release {
        None => Given::Later,
        Some(release) if release.dropped().is_some() => Given::Nothing,
        Some(release) if !counts(release, &planned.id, standing.attempt) => Given::Nothing,
        Some(_) => Given::All,
    }
}

fn counts(release: &Release, rollout: &str, attempt: u32) -> bool {
    let counted = &release.decided().counted;
    counted.iter().any(|counted| counted.rollout.as_str() == rollout && counted.attempt == attempt)
}

/// Every release is one that may be.
pub(crate) fn check(world: &World, all: &[Standing], groups: &Groups) -> Result<(), String> {
    for (id, look) in groups {
        let members: Vec<&Standing> =
            all.iter().filter(|member| world.plan.rollouts[member.rollout].group.as_ref() == Some(id)).collect();
        match &look.release {
            Some(release) => {
                released(world, &members, look, release).map_err(|fault| format!("group {id}: {fault}"))?
            }
            None if rules(world).are_released() => {
                let size = look.size.map_or(usize::MAX, |size| size as usize);
                let whole = members.len() >= size && members.iter().all(|member| is_done(member));
                if whole {
                    return Err(format!("group {id} is whole and not released: {look:?}"));
                }
            }
            None => {}
        }
    }
    Ok(())
}

/// Nothing more comes of it.
fn is_done(member: &Standing) -> bool {
    match &member.state {
        State::Open => false,
        State::Finalised => true,
        State::Ended(ended) => {
            ended.outcome == Outcome::Retired || ended.is_final || ended.reason != crate::plan::DISCARDED
        }
    }
}

fn released(world: &World, members: &[&Standing], look: &GroupLook, release: &Release) -> Result<(), String> {
    let decided = release.decided();
    if decided.rules != rules(world) {
        return Err(format!("its rules are {:?}", decided.rules));
    }
    let mut rewards = Vec::new();
    for counted in &decided.counted {
        let member = members.iter().find(|member| world.plan.rollouts[member.rollout].id == counted.rollout.as_str());
        let member = member.filter(|member| member.has_rows() && member.attempt == counted.attempt);
        let member = member.ok_or_else(|| format!("{counted:?} is counted, and is not finalised"))?;
        let reward = world.plan.rollouts[member.rollout].reward;
        if counted.reward.to_bits() != reward.to_bits() {
            return Err(format!("{counted:?} has the reward {reward}"));
        }
        rewards.push(reward);
    }
    let late = members.iter().filter(|member| {
        member.has_rows() && !counts(release, &world.plan.rollouts[member.rollout].id, member.attempt)
    });
    // Its size may have been said after it was released.
    if decided.size.is_some_and(|size| look.size != Some(size)) {
        return Err(format!("another size was decided than is known: {look:?}"));
    }
    let (late, size) = (late.count(), decided.size.map_or(usize::MAX, |size| size as usize));
    let fine = match decided.released_for {
        ReleasedFor::Whole => late == 0 && decided.counted.len() + decided.absent as usize == size,
        ReleasedFor::Quorum => decided.rules.quorum.is_some_and(|quorum| rewards.len() >= quorum as usize),
        ReleasedFor::Timeout => rewards.len() < size,
        ReleasedFor::Operator => false,
    };
    world.count(
        match (release.dropped(), decided.released_for) {
            (Some(_), _) => "groups dropped",
            (None, ReleasedFor::Whole) => "groups whole",
            (None, ReleasedFor::Quorum) => "groups by quorum",
            (None, ReleasedFor::Timeout | ReleasedFor::Operator) => "groups by timeout",
        },
        1,
    );
    world.count("late members", late);
    let equal = rewards.len() > 1 && rewards.iter().all(|reward| *reward == rewards[0]);
    let least = if decided.size == Some(1) { 1 } else { 2 };
    let dropped = match () {
        () if rewards.len() < least => Some(DroppedFor::TooFewMembers),
        () if equal && decided.rules.drop_zero_variance => Some(DroppedFor::ZeroVariance),
        () => None,
    };
    if fine && dropped == release.dropped() { Ok(()) } else { Err(format!("it should not be so: {look:?}")) }
}

/// The advantage of one of these rollouts by the rules of the estimator, each sum made anew.
fn advantage(estimator: Estimator, rewards: &BTreeMap<&str, f64>, rollout: &str) -> Option<f64> {
    let own = *rewards.get(rollout)?;
    let mean = |of: &[f64]| of.iter().sum::<f64>() / of.len() as f64;
    let all: Vec<f64> = rewards.values().copied().collect();
    let others: Vec<f64> = rewards.iter().filter(|(id, _)| **id != rollout).map(|(_, reward)| *reward).collect();
    let deviation = || {
        let variance: f64 =
            all.iter().map(|reward| (reward - mean(&all)).powi(2)).sum::<f64>() / (all.len() - 1) as f64;
        variance.sqrt()
    };
    match estimator {
        Estimator::None => None,
        Estimator::Mean | Estimator::Grpo | Estimator::Rloo if others.is_empty() => Some(0.0),
        Estimator::Mean => Some(own - mean(&all)),
        Estimator::Grpo => Some((own - mean(&all)) / (deviation() + 1e-6)),
        Estimator::Rloo => Some(own - mean(&others)),
    }
}

fn nearly(one: Option<f64>, other: Option<f64>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => (one - other).abs() <= 1e-9 * (1.0 + other.abs()),
        (one, other) => one == other,
    }
}

/// What these rows of a consumer group say of their groups is what the counted rollouts come to.
pub(crate) fn rows<'a>(
    world: &World,
    all: &[Standing],
    groups: &Groups,
    settings: &ConsumerGroupSettings,
    found: impl Iterator<Item = &'a Row>,
) -> Result<(), String> {
    for row in found {
        let header = &row.header;
        let look = groups.get(&header.group_id).filter(|_| waits(world, settings));
        let Some(release) = look.and_then(|look| look.release.as_ref()) else {
            if look.is_some() || header.advantage.is_some() || header.group_rows.is_some() {
                return Err(format!("{} came before its group was released: {header:?}", row.row_id));
            }
            continue;
        };
        let counted = &release.decided().counted;
        let rewards: BTreeMap<&str, f64> =
            counted.iter().map(|counted| (counted.rollout.as_str(), counted.reward)).collect();
        let expected = advantage(rules(world).estimator, &rewards, &header.rollout_id);
        let (mut group_rows, mut trained) = (0, 0);
        let members: BTreeSet<&str> = rewards.keys().copied().collect();
        for member in all.iter().filter(|member| members.contains(world.plan.rollouts[member.rollout].id.as_str())) {
            let of_all = ConsumerGroupSettings { policy: None, ..settings.clone() };
            let answer = member.accepted.answer(&of_all).map_err(|refusal| format!("the model says {refusal:?}"))?;
            let of_policy = answer.rows.iter().filter(|row| row.policy == header.policy);
            let tokens = |row: &crate::case::Row| row.loss_mask.iter().map(|mask| u64::from(*mask)).sum::<u64>();
            for row in of_policy {
                (group_rows, trained) = (group_rows + 1, trained + tokens(row));
            }
        }
        let sums = (Some(group_rows), Some(trained)) == (header.group_rows, header.group_trained_tokens);
        if !nearly(header.advantage, expected) || !sums || release.dropped().is_some() {
            return Err(format!(
                "{} has {header:?}, not {expected:?}, {group_rows}, {trained} of {rewards:?}",
                row.row_id
            ));
        }
        world.count("advantages compared", usize::from(expected.is_some()));
    }
    Ok(())
}
