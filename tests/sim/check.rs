//! What must be true when all is at rest: every rollout has ended as what was accepted of it says, its rows are those of the slow
//! model and arrived everywhere, the ledger adds up, and memory holds tombstones and groups only.

use std::collections::BTreeMap;

use hedgerow::forest::plan::CallLedger;
use hedgerow::ids::RolloutId;
use hedgerow::limits;
use hedgerow::rollout::run_settings::{ConsumerGroupSettings, Unit as UnitOf};
use hedgerow::rollout::settings::MissingCallRule;
use hedgerow::rollout::{Rollout, status};
use hedgerow::store::effect::{Ended, Outcome};
use hedgerow::store::sequencer::{Command, Look, RunLook};
use hedgerow::store::{RolloutKey, Store};
use hedgerow::telemetry::{CallCounts, EndReason, RowCounts};

use crate::applied::Applied;
use crate::case::{OnBrokenLink, Row};
use crate::character::ConsumerGroup;
use crate::drive::Field;
use crate::expected::Accepted;
use crate::groups::{Given, Groups};
use crate::life::Life;
use crate::plan::{DISCARDED, RUN, run};
use crate::service::{self, Unit};
use crate::world::World;
use crate::{groups, invariants, tail, wire};

/// A rollout, as the service has it, and its attempt as far as it was accepted.
pub(crate) struct Standing {
    pub(crate) rollout: usize,
    pub(crate) attempt: u32,
    pub(crate) state: State,
    pub(crate) accepted: Accepted,
}

pub(crate) enum State {
    Open,
    Finalised,
    Ended(Ended),
}

impl Standing {
    /// Its rows are made.
    pub(crate) fn has_rows(&self) -> bool {
        match &self.state {
            State::Finalised => true,
            State::Open => false,
            State::Ended(ended) => ended.outcome == Outcome::Retired,
        }
    }
}

fn key(world: &World, rollout: usize) -> RolloutKey {
    RolloutKey { run: run(), rollout: RolloutId::parse(&world.plan.rollouts[rollout].id).expect("an id") }
}

/// Every request is answered, and every rollout of which something was accepted has ended.
pub(crate) fn all_has_ended(world: &World, life: &Life) -> Result<(), String> {
    if let Some(request) = world.answers.borrow().iter().position(Option::is_none) {
        let asked = &world.plan.requests[request];
        return Err(format!("{:?} of {:?} is not answered", asked.what, asked.about));
    }
    let has_ended = |standing: &Standing| matches!(standing.state, State::Ended(_));
    match standing(world, &life.store)?.iter().find(|standing| !has_ended(standing)) {
        None => Ok(()),
        Some(open) => {
            let look = |open: &Rollout| format!("until {:?}, {:?}", open.next_deadline_ms(), status::missing(open));
            let waits = life.store.show(&key(world, open.rollout), |view| look(view.rollout));
            Err(format!("{} has not ended: {waits:?}", world.plan.rollouts[open.rollout].id))
        }
    }
}

fn standing(world: &World, store: &Store) -> Result<Vec<Standing>, String> {
    let mut all = Vec::new();
    for (rollout, planned) in world.plan.rollouts.iter().enumerate() {
        let (model, key) = (world.model.borrow(), key(world, rollout));
        let newest = model.attempts(rollout).last().copied();
        let attempt = match (store.attempt(&key), newest) {
            (None, None) => continue,
            (Some(there), newest) if newest == Some(there) || model.may_be_open(rollout, there) => there,
            other => return Err(format!("rollout {} is at (attempt, newest accepted) {other:?}", planned.id)),
        };
        let state = match store.show(&key, |view| view.rollout.finalised().is_some()) {
            Some(Ok(true)) => State::Finalised,
            Some(Ok(false)) => State::Open,
            Some(Err(ended)) => State::Ended(ended),
            None => return Err(format!("rollout {} is gone", planned.id)),
        };
        let accepted = Accepted::new(&planned.case, &model.known(rollout, attempt));
        all.push(Standing { rollout, attempt, state, accepted });
    }
    Ok(all)
}

/// All of it, at a moment when nothing is on its way.
pub(crate) fn all(field: &mut Field) {
    let (world, life) = (field.world.clone(), field.life());
    let all = match standing(&world, &life.store) {
        Ok(all) => all,
        Err(fault) => return world.fail(fault),
    };
    for standing in &all {
        let id = &world.plan.rollouts[standing.rollout].id;
        world.check(format_args!("rollout {id}"), fate(&world, standing));
    }
    let groups = groups::ask(field);
    world.check("groups", groups::check(&world, &all, &groups));
    for (group, of_group) in world.character.consumer_groups.iter().enumerate() {
        let applied = world.applied[group].borrow();
        for standing in &all {
            let id = &world.plan.rollouts[standing.rollout].id;
            let given = groups::given(&world, standing, &groups, &of_group.settings);
            let judged = rows(&world, (standing, given), of_group, &applied);
            world.check(format_args!("rows of {id} for {}", of_group.name), judged);
        }
        let judged = groups::rows(&world, &all, &groups, &of_group.settings, applied.rows.values());
        world.check(format_args!("groups of {}", of_group.name), judged);
    }
    let by_row = ConsumerGroupSettings::default();
    world.check("groups of a tail", groups::rows(&world, &all, &groups, &by_row, world.seen.borrow().iter()));
    world.check("rows of two consumer groups", same_for_all(&world));
    for standing in all.iter().filter(|standing| standing.has_rows()) {
        world.check("rows of a tail", tail::rows(&world, standing.rollout, standing.attempt, &standing.accepted));
    }
    let Some(Ok(look)) = field.ask(|reply| Command::Look(Look::Run(run(), reply))) else {
        return world.check("run", Err("it is not shown".to_owned()));
    };
    world.check("ledger", ledger(&world, (&all, &groups), &look));
}

/// It stands where it must, by what was accepted of it.
fn fate(world: &World, standing: &Standing) -> Result<(), String> {
    let accepted = &standing.accepted;
    let known = world.model.borrow().known(standing.rollout, standing.attempt);
    let settings = &world.character.settings.rollout;
    let complete = accepted.sealed && accepted.rewarded;
    let links_break = accepted.answer(&ConsumerGroupSettings::default()).is_err();
    let may_be_finalised = || {
        let may_miss = settings.missing_call == MissingCallRule::Finalise;
        known.discarded.is_none() && complete && (may_miss || !accepted.misses_calls) && !links_break
    };
    let (fine, what) = match &standing.state {
        State::Open => (known.discarded.is_none() && !(complete && accepted.is_whole()), "open"),
        State::Finalised => (may_be_finalised(), "finalised"),
        State::Ended(ended) => match (ended.outcome, ended.reason.as_str()) {
            (Outcome::Retired, _) if accepted.misses_calls => (may_be_finalised(), "retired without calls"),
            (Outcome::Retired, _) => (may_be_finalised(), "retired"),
            (Outcome::Discarded, DISCARDED) => (known.discarded.is_some(), "discarded"),
            (Outcome::Discarded, "idle_timeout") => (known.discarded.is_none() && !complete, "gone idle"),
            (Outcome::Discarded, "missing_call") => {
                let discards = settings.missing_call == MissingCallRule::Discard;
                (discards && accepted.sealed && accepted.misses_calls, "discarded for missing calls")
            }
            (Outcome::Discarded, "broken_link") => {
                let discards = world.character.model.on_broken_link == OnBrokenLink::Discard;
                (discards && complete && links_break, "discarded for broken links")
            }
            (Outcome::Discarded, _) => (false, "discarded for another reason"),
        },
    };
    world.count(what, 1);
    if fine { Ok(()) } else { Err(format!("it is {what}, where {known:?} is known of {:?}", accepted.case)) }
}

/// The rows that a consumer group has applied of a rollout are those of the model: all, once it has retired.
fn rows(
    world: &World,
    (standing, given): (&Standing, Given),
    group: &ConsumerGroup,
    applied: &Applied,
) -> Result<(), String> {
    let planned = &world.plan.rollouts[standing.rollout];
    let mut found: Vec<service::Row> =
        applied.rows.values().filter(|row| row.header.rollout_id == planned.id).cloned().collect();
    if !standing.has_rows() || given != Given::All {
        return if found.is_empty() { Ok(()) } else { Err(format!("it should have none, and gave {found:?}")) };
    }
    let answer = standing.accepted.answer(&group.settings).map_err(|refusal| format!("the model says {refusal:?}"))?;
    for row in &mut found {
        crate::credit::check(&planned.case, row)?;
        let header = &mut row.header;
        if (header.attempt, header.incomplete) != (standing.attempt, standing.accepted.misses_calls) {
            return Err(format!("attempt {}, incomplete {}", header.attempt, header.incomplete));
        }
        // What the tests' reader of rows knows nothing of.
        header.incomplete = false;
        row.row_id = row.row_id.replacen(&format!("/{}/", header.attempt), "/0/", 1);
    }
    found.sort_by_key(|row| (row.header.policy.clone(), row.header.row_index));
    let of_group = planned.group.as_ref().map(|group| format!("{RUN}//{group}"));
    let is_of = |unit: &String| {
        let whole = of_group.as_ref().is_some_and(|id| unit == id || unit.starts_with(&format!("{id}/")));
        whole || unit.starts_with(&format!("{RUN}/{}/", planned.id))
    };
    let given_up = applied.drop_asked.iter().any(is_of);
    // One that was made late gets what was still there; and where the rollout has not retired, something may be on its way.
    let (is_underway, by_row) = (matches!(standing.state, State::Finalised), group.settings.unit == UnitOf::Row);
    if (given_up || is_underway || !group.declared) && found.len() < answer.rows.len() {
        return some_rows(&answer.rows, found, planned.reward, (given_up || is_underway) && by_row);
    }
    let read = wire::rows(&Unit { rows: found, ..Unit::default() }, planned.reward)?;
    wire::same_rows(&answer.rows, &read)?;
    world.count("rows compared", read.len());
    let case = &standing.accepted.case;
    let mut limited = case.clone();
    limited.settings.max_row_tokens = group.settings.max_row_tokens.map(|tokens| tokens as usize);
    let policies: std::collections::BTreeSet<&str> = read.iter().map(|row| row.policy.as_str()).collect();
    let received = crate::case::Answer { rows: read.clone(), ..answer.clone() };
    policies.into_iter().try_for_each(|policy| invariants::check_rows(&limited, &received, policy))
}

/// A row is the same to the last byte for whoever takes it under the same bound of length.
fn same_for_all(world: &World) -> Result<(), String> {
    let groups = world.character.consumer_groups.iter().zip(&world.applied);
    let mut first: BTreeMap<(Option<u32>, bool, String), service::Row> = BTreeMap::new();
    let mut rows: Vec<(Option<u32>, service::Row)> = Vec::new();
    for (group, applied) in groups {
        let bound = group.settings.max_row_tokens;
        rows.extend(applied.borrow().rows.values().map(|row| (bound, row.clone())));
    }
    rows.extend(world.seen.borrow().iter().map(|row| (None, row.clone())));
    for (bound, row) in rows {
        // Who has waited for the group is told of it.
        let has_waited = row.header.group_rows.is_some();
        let known = first.entry((bound, has_waited, row.row_id.clone())).or_insert_with(|| row.clone());
        if *known != row {
            return Err(format!("{known:?} and {row:?}"));
        }
    }
    Ok(())
}

/// These rows are some of those, or none if they come together.
pub(crate) fn some_rows(all: &[Row], found: Vec<service::Row>, reward: f64, by_row: bool) -> Result<(), String> {
    if !found.is_empty() && !by_row {
        return Err(format!("{} rows of {}, which come together or not at all", found.len(), all.len()));
    }
    for mut row in found {
        (row.header.row_index, row.header.row_count) = (0, 1);
        let read = wire::rows(&Unit { rows: vec![row], ..Unit::default() }, reward)?;
        if !all.iter().any(|row| wire::same_rows(std::slice::from_ref(row), &read).is_ok()) {
            return Err(format!("{read:?} is none of {all:?}"));
        }
    }
    Ok(())
}

/// What became of all accepted calls and of all rows (RULES 3.6.4).
fn ledger(world: &World, (all, groups): (&[Standing], &Groups), look: &RunLook) -> Result<(), String> {
    let open = all.iter().filter(|standing| matches!(standing.state, State::Open)).count() as u64;
    let finalised = all.iter().filter(|standing| matches!(standing.state, State::Finalised)).count() as u64;
    if (look.open_rollouts, look.finalised_rollouts) != (open, finalised) {
        let (open_rollouts, waiting) = (look.open_rollouts, look.finalised_rollouts);
        return Err(format!("{open_rollouts} of {open} are open, {waiting} of {finalised} wait"));
    }
    for (policy, counts) in &look.calls {
        let mut expected = CallLedger::default();
        let (mut open, mut gone) = (0, 0);
        for standing in all {
            let model = world.model.borrow();
            let older = model.attempts(standing.rollout).into_iter().filter(|attempt| *attempt < standing.attempt);
            gone += older.map(|attempt| model.known(standing.rollout, attempt).calls.len() as u64).sum::<u64>();
            let calls = standing.accepted.calls as u64;
            match &standing.state {
                State::Open => open += calls,
                State::Ended(ended) if ended.outcome == Outcome::Discarded => gone += calls,
                State::Finalised | State::Ended(_) => add(&mut expected, &of_rollout(standing, policy.as_str())?),
            }
        }
        let all_gone: u64 = counts.gone.iter().map(|(_, calls)| calls).sum();
        let CallCounts { accepted, pending, trained, context, in_no_row, empty, not_kept, too_long, .. } = *counts;
        let found = CallLedger { trained, context, in_no_row, empty, not_kept, too_long };
        if found != expected || pending != open || all_gone != gone || accepted != expected.sum() + open + gone {
            return Err(format!("{policy:?}: {counts:?}, and not {expected:?} with {open} open and {gone} gone"));
        }
    }
    world.character.consumer_groups.iter().filter(|group| group.declared).try_for_each(|group| {
        let found = look.rows.iter().find(|rows| rows.consumer_group == group.name.as_str());
        let found = &found.ok_or_else(|| format!("there is no {}", group.name))?.rows;
        let given = all.iter().map(|standing| (standing, groups::given(world, standing, groups, &group.settings)));
        row_ledger(given, group, found)
    })
}

/// What became of a consumer group's rows: each has one place, and once all has ended all are acknowledged, given up by hand, or never
/// given out since their group was without them.
fn row_ledger<'a>(
    all: impl Iterator<Item = (&'a Standing, Given)>,
    group: &ConsumerGroup,
    found: &RowCounts,
) -> Result<(), String> {
    let (mut made, mut never, mut underway) = (0, 0, false);
    for (standing, given) in all.filter(|(standing, given)| standing.has_rows() && *given != Given::Later) {
        let answer = standing.accepted.answer(&group.settings).map_err(|refusal| format!("{refusal:?}"))?;
        made += answer.rows.len() as u64;
        never += if given == Given::Nothing { answer.rows.len() as u64 } else { 0 };
        underway |= matches!(standing.state, State::Finalised);
    }
    let dropped: u64 = found.dropped.iter().map(|(_, rows)| rows).sum();
    let dropped_for = |reasons: &[&str]| -> u64 {
        found.dropped.iter().filter(|(reason, _)| reasons.contains(reason)).map(|(_, rows)| rows).sum()
    };
    let by_hand = dropped_for(&["operator"]);
    let adds_up = found.made == made && found.acknowledged + found.waiting + found.leased + dropped == made;
    let is_over = found.acknowledged + by_hand + never == made;
    let adds_up = adds_up && dropped_for(&["late", "group_dropped"]) == never;
    if adds_up && (underway || is_over) { Ok(()) } else { Err(format!("{}: {found:?} of {made} rows", group.name)) }
}

/// What became of a finalised rollout's calls, for one policy.
fn of_rollout(standing: &Standing, policy: &str) -> Result<CallLedger, String> {
    let accepted = &standing.accepted;
    let answer =
        accepted.answer(&ConsumerGroupSettings::default()).map_err(|refusal| format!("the model says {refusal:?}"))?;
    let mut ledger = invariants::count(&accepted.case, &answer, policy);
    let without_ids = accepted.calls - accepted.case.calls.len();
    ledger.empty += accepted.empty_without_ids as u64;
    ledger.not_kept += (without_ids - accepted.empty_without_ids) as u64;
    Ok(ledger)
}

fn add(sum: &mut CallLedger, more: &CallLedger) {
    sum.trained += more.trained;
    sum.context += more.context;
    sum.in_no_row += more.in_no_row;
    sum.empty += more.empty;
    sum.not_kept += more.not_kept;
    sum.too_long += more.too_long;
}

/// Memory holds tombstones and groups, and nothing else. To be asked after a replay, which buries each under its own reason.
pub(crate) fn memory(field: &mut Field) {
    let (world, life) = (field.world.clone(), field.life());
    let Some(Ok(look)) = field.ask(|reply| Command::Look(Look::Run(run(), reply))) else {
        return world.fail("the run is not shown");
    };
    let released = groups::ask(field);
    // All rollouts have ids of one length.
    let id_bytes = world.plan.rollouts[0].id.len();
    let tombstone = |reason: &str| limits::TOMBSTONE_BYTES + (RUN.len() + id_bytes + reason.len()) as u64;
    let mut expected = 0;
    for rollout in 0..world.plan.rollouts.len() {
        if let Some(Err(ended)) = life.store.show(&key(&world, rollout), |_| ())
            && ended.outcome == Outcome::Retired
        {
            expected += tombstone(&ended.reason);
        }
    }
    for (reason, rollouts) in look.gone_rollouts {
        let text = if reason == EndReason::Harness { DISCARDED } else { reason.as_str() };
        // What a newer attempt has replaced has no tombstone of its own.
        expected += if reason == EndReason::Superseded { 0 } else { rollouts * tombstone(text) };
    }
    let mut groups: BTreeMap<&String, u64> = BTreeMap::new();
    for (rollout, planned) in world.plan.rollouts.iter().enumerate() {
        if let (Some(group), Some(_)) = (&planned.group, life.store.show(&key(&world, rollout), |_| ())) {
            *groups.entry(group).or_default() += 1;
        }
    }
    for (group, members) in groups {
        expected += limits::GROUP_BYTES + group.len() as u64;
        expected += members * (limits::GROUP_MEMBER_BYTES + id_bytes as u64);
        let release = released.get(group).and_then(|look| look.release.as_ref());
        expected += release.map_or(0, |release| release.bytes());
    }
    // The tombstones of attempts that have newer ones go with the part of the log that they stand in. Attempts count from 0, and of
    // some, the newest too, nothing was accepted but that they were opened.
    let older = |rollout| life.store.attempt(&key(&world, rollout)).map_or(0, u64::from);
    let older: u64 = (0..world.plan.rollouts.len()).map(older).sum();
    let used = life.store.memory().used_bytes();
    if used > expected || used + older * tombstone("the longest of reasons") < expected {
        world.fail(format!("memory holds {used} bytes, and should hold {expected}"));
    }
}
