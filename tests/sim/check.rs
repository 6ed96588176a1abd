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
use hedgerow::telemetry::{CallCounts, EndReason};

use crate::applied::Applied;
use crate::case::{OnBrokenLink, Row};
use crate::character::ConsumerGroup;
use crate::drive::Field;
use crate::expected::Accepted;
use crate::life::Life;
use crate::plan::{DISCARDED, RUN, run};
use crate::service::{self, Unit};
use crate::world::World;
use crate::{invariants, wire};

/// A rollout that has ended.
struct Over {
    rollout: usize,
    ended: Ended,
    accepted: Accepted,
}

fn key(world: &World, rollout: usize) -> RolloutKey {
    RolloutKey { run: run(), rollout: RolloutId::parse(&world.plan.rollouts[rollout].id).expect("an id") }
}

/// Every request is answered, and every rollout of which something was accepted has ended.
pub(crate) fn all_has_ended(world: &World, life: &Life) -> Result<(), String> {
    if let Some(request) = world.answers.borrow().iter().position(Option::is_none) {
        return Err(format!("{:?} of {:?} is not answered", world.plan.requests[request].what, request));
    }
    ended(world, &life.store).map(|_| ())
}

fn ended(world: &World, store: &Store) -> Result<Vec<Over>, String> {
    let mut all = Vec::new();
    for (rollout, planned) in world.plan.rollouts.iter().enumerate() {
        let model = world.model.borrow();
        let newest = model.attempts(rollout).last().copied();
        let look = |open: &mut Rollout| (open.next_deadline_ms(), status::missing(open), open.finalised().is_some());
        let ended = match (store.look(&key(world, rollout), look), newest) {
            (None, None) => continue,
            (Some(Err(ended)), Some(newest)) if ended.attempt == newest => ended,
            (Some(Err(ended)), _) if model.may_be_open(rollout, ended.attempt) => ended,
            (Some(Ok((deadline_ms, missing, finalised))), _) => {
                let id = &planned.id;
                return Err(format!("{id} has not ended: finalised {finalised}, until {deadline_ms:?}, {missing:?}"));
            }
            (there, newest) => {
                let there = there.map(|there| there.err());
                return Err(format!("rollout {} is {there:?}, and attempt {newest:?} was accepted", planned.id));
            }
        };
        let accepted = Accepted::new(&planned.case, &model.known(rollout, ended.attempt));
        all.push(Over { rollout, ended, accepted });
    }
    Ok(all)
}

/// All of it.
pub(crate) fn all(field: &mut Field) {
    let (world, life) = (field.world.clone(), field.life());
    let all = match ended(&world, &life.store) {
        Ok(all) => all,
        Err(fault) => return world.fail(fault),
    };
    for over in &all {
        let id = &world.plan.rollouts[over.rollout].id;
        world.check(format_args!("rollout {id}"), fate(&world, over));
    }
    for (group, of_group) in world.character.consumer_groups.iter().enumerate() {
        let applied = world.applied[group].borrow();
        for over in &all {
            let id = &world.plan.rollouts[over.rollout].id;
            let what = format!("rows of {id} for {}", of_group.name);
            world.check(what, rows(&world, over, of_group, &applied));
        }
    }
    let Some(Ok(look)) = field.ask(|reply| Command::Look(Look::Run(run(), reply))) else {
        return world.fail("the run is not shown");
    };
    world.check("ledger", ledger(&world, &all, &look));
}

/// It ended as it must, by what was accepted of it.
fn fate(world: &World, over: &Over) -> Result<(), String> {
    let (ended, accepted) = (&over.ended, &over.accepted);
    let known = world.model.borrow().known(over.rollout, ended.attempt);
    let settings = &world.character.settings.rollout;
    let complete = accepted.sealed && accepted.rewarded;
    let links_break = accepted.answer(&ConsumerGroupSettings::default()).is_err();
    let fine = match (ended.outcome, ended.reason.as_str()) {
        (Outcome::Retired, _) => {
            let may_miss = settings.missing_call == MissingCallRule::Finalise;
            known.discarded.is_none() && complete && (may_miss || !accepted.misses_calls) && !links_break
        }
        (Outcome::Discarded, DISCARDED) => known.discarded.is_some(),
        (Outcome::Discarded, "idle_timeout") => known.discarded.is_none() && !complete,
        (Outcome::Discarded, "missing_call") => {
            settings.missing_call == MissingCallRule::Discard && accepted.sealed && accepted.misses_calls
        }
        (Outcome::Discarded, "broken_link") => {
            world.character.model.on_broken_link == OnBrokenLink::Discard && complete && links_break
        }
        (Outcome::Discarded, _) => false,
    };
    world.count(
        match (ended.outcome, ended.reason.as_str()) {
            (Outcome::Retired, _) if accepted.misses_calls => "rollouts finalised without calls",
            (Outcome::Retired, _) => "rollouts retired",
            (Outcome::Discarded, DISCARDED) => "rollouts discarded",
            (Outcome::Discarded, "idle_timeout") => "rollouts gone idle",
            (Outcome::Discarded, "missing_call") => "rollouts missing calls",
            (Outcome::Discarded, _) => "rollouts with broken links",
        },
        1,
    );
    if fine { Ok(()) } else { Err(format!("it is {ended:?}, where {known:?} is known of {:?}", accepted.case)) }
}

/// The rows that a consumer group has applied of a rollout are those of the model.
fn rows(world: &World, over: &Over, group: &ConsumerGroup, applied: &Applied) -> Result<(), String> {
    let planned = &world.plan.rollouts[over.rollout];
    let mut found: Vec<service::Row> =
        applied.rows.values().filter(|row| row.header.rollout_id == planned.id).cloned().collect();
    if over.ended.outcome == Outcome::Discarded {
        return if found.is_empty() { Ok(()) } else { Err(format!("it was discarded, and gave {found:?}")) };
    }
    let answer = over.accepted.answer(&group.settings).map_err(|refusal| format!("the model says {refusal:?}"))?;
    for row in &mut found {
        let header = &mut row.header;
        if (header.attempt, header.incomplete) != (over.ended.attempt, over.accepted.misses_calls) {
            return Err(format!("attempt {}, incomplete {}", header.attempt, header.incomplete));
        }
        // What the tests' reader of rows knows nothing of.
        header.incomplete = false;
        row.row_id = row.row_id.replacen(&format!("/{}/", header.attempt), "/0/", 1);
    }
    found.sort_by_key(|row| (row.header.policy.clone(), row.header.row_index));
    let given_up = applied.drop_asked.iter().any(|unit| unit.starts_with(&format!("{RUN}/{}/", planned.id)));
    // One that was made late gets what was still there.
    let may_lack = given_up || !group.declared;
    if may_lack && found.len() < answer.rows.len() {
        return some_rows(&answer.rows, found, planned.reward, given_up && group.settings.unit == UnitOf::Row);
    }
    let read = wire::rows(&Unit { rows: found, ..Unit::default() }, planned.reward)?;
    wire::same_rows(&answer.rows, &read)?;
    world.count("rows compared", read.len());
    let case = &over.accepted.case;
    let mut limited = case.clone();
    limited.settings.max_row_tokens = group.settings.max_row_tokens.map(|tokens| tokens as usize);
    let policies: std::collections::BTreeSet<&str> = read.iter().map(|row| row.policy.as_str()).collect();
    let received = crate::case::Answer { rows: read.clone(), ..answer.clone() };
    policies.into_iter().try_for_each(|policy| invariants::check_rows(&limited, &received, policy))
}

/// These rows are some of those, or none if they come together.
fn some_rows(all: &[Row], found: Vec<service::Row>, reward: f64, by_row: bool) -> Result<(), String> {
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
fn ledger(world: &World, all: &[Over], look: &RunLook) -> Result<(), String> {
    if (look.open_rollouts, look.finalised_rollouts) != (0, 0) {
        return Err(format!("{} are open, {} wait", look.open_rollouts, look.finalised_rollouts));
    }
    for (policy, counts) in &look.calls {
        let mut expected = CallLedger::default();
        let mut gone = 0;
        for over in all {
            let model = world.model.borrow();
            let older = model.attempts(over.rollout).into_iter().filter(|attempt| *attempt < over.ended.attempt);
            gone += older.map(|attempt| model.known(over.rollout, attempt).calls.len() as u64).sum::<u64>();
            match over.ended.outcome {
                Outcome::Discarded => gone += over.accepted.calls as u64,
                Outcome::Retired => add(&mut expected, &of_rollout(over, policy.as_str())?),
            }
        }
        let all_gone: u64 = counts.gone.iter().map(|(_, calls)| calls).sum();
        let CallCounts { accepted, pending, trained, context, in_no_row, empty, not_kept, too_long, .. } = *counts;
        let found = CallLedger { trained, context, in_no_row, empty, not_kept, too_long };
        if found != expected || pending != 0 || all_gone != gone || accepted != expected.sum() + gone {
            return Err(format!("{policy:?}: {counts:?}, and not {expected:?} with {gone} gone"));
        }
    }
    for group in world.character.consumer_groups.iter().filter(|group| group.declared) {
        let found = look.rows.iter().find(|rows| rows.consumer_group == group.name.as_str());
        let found = &found.ok_or_else(|| format!("there is no {}", group.name))?.rows;
        let mut made = 0;
        for over in all.iter().filter(|over| over.ended.outcome == Outcome::Retired) {
            made += over.accepted.answer(&group.settings).map_err(|refusal| format!("{refusal:?}"))?.rows.len() as u64;
        }
        let by_hand = found.dropped.iter().find(|(reason, _)| *reason == "operator").map_or(0, |(_, rows)| *rows);
        if (found.made, found.waiting, found.leased) != (made, 0, 0) || found.acknowledged + by_hand != made {
            return Err(format!("{}: {found:?} of {made} rows", group.name));
        }
    }
    Ok(())
}

/// What became of a finalised rollout's calls, for one policy.
fn of_rollout(over: &Over, policy: &str) -> Result<CallLedger, String> {
    let accepted = &over.accepted;
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
    // All rollouts have ids of one length.
    let id_bytes = world.plan.rollouts[0].id.len();
    let tombstone = |reason: &str| limits::TOMBSTONE_BYTES + (RUN.len() + id_bytes + reason.len()) as u64;
    let mut expected = look.retired_rollouts * tombstone("acknowledged");
    for (reason, rollouts) in look.gone_rollouts {
        expected += match reason {
            EndReason::Superseded => 0,
            EndReason::Harness => rollouts * tombstone(DISCARDED),
            other => rollouts * tombstone(other.as_str()),
        };
    }
    let mut groups: BTreeMap<&String, u64> = BTreeMap::new();
    for (rollout, planned) in world.plan.rollouts.iter().enumerate() {
        if let (Some(group), Some(_)) = (&planned.group, life.store.look(&key(&world, rollout), |_| ())) {
            *groups.entry(group).or_default() += 1;
        }
    }
    for (group, members) in groups {
        expected += limits::GROUP_BYTES + group.len() as u64;
        expected += members * (limits::GROUP_MEMBER_BYTES + id_bytes as u64);
    }
    let used = life.store.memory().used_bytes();
    if used != expected {
        world.fail(format!("memory holds {used} bytes, and should hold {expected}"));
    }
}
