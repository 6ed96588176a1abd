//! What people and tools are shown of runs, groups and consumer groups. Looking changes nothing.
//!
//! Lists are given in pages by id, from behind the last one that was shown: so what comes and goes between two pages neither
//! repeats nor hides anything else. Work for one page is bounded, since everybody waits for this task.

use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::oneshot;

use crate::error::Refusal;
use crate::forest::link::DriftKind;
use crate::group::{Group, Member, Release, Statistics};
use crate::ids::{AgentId, ConsumerGroupId, GroupId, Name, RolloutId, RunId};
use crate::limits;
use crate::queue::{
    ConsumerFacts, ConsumerGroup, ConsumerId, GroupDefinition, GroupStats, OpenStep, UnitId, WaitingFor,
};
use crate::rollout::drift::DriftCount;
use crate::telemetry::{CallCounts, EndReason, RowCounts};

use super::super::{RolloutKey, Slot};
use super::figures::row_counts;
use super::groups::KeptGroup;
use super::runs::run_not_found;
use super::{RunState, Sequencer, UnitRows};

/// What is asked to be shown, and where the answer goes.
pub enum Look {
    /// Runs after this one, by id, and so many.
    Runs(Option<RunId>, usize, oneshot::Sender<Vec<RunLook>>),
    /// One run.
    Run(RunId, oneshot::Sender<Result<RunLook, Refusal>>),
    /// Ids of rollouts of a run, and of this group if one is said, after this one, and so many.
    Rollouts(RunId, Option<GroupId>, Option<RolloutId>, usize, oneshot::Sender<Result<Vec<RolloutId>, Refusal>>),
    /// Groups of a run after this one, and so many; only those of which something may still come, if that is said.
    Groups(RunId, Option<GroupId>, usize, bool, oneshot::Sender<Result<GroupPage, Refusal>>),
    /// These groups of a run, as far as they are there.
    TheseGroups(RunId, Vec<GroupId>, oneshot::Sender<Result<Vec<GroupLook>, Refusal>>),
    /// Consumer groups of a run after this one, by name, and so many.
    ConsumerGroups(RunId, Option<ConsumerGroupId>, usize, oneshot::Sender<Result<ConsumerGroupPage, Refusal>>),
}

/// Some groups, and behind which one the next page begins, if there may be one.
pub type GroupPage = (Vec<GroupLook>, Option<GroupId>);

/// Some consumer groups, and behind which one the next page begins, if there may be one.
pub type ConsumerGroupPage = (Vec<ConsumerGroupLook>, Option<ConsumerGroupId>);

/// A run, for who looks.
#[derive(Clone, Debug)]
pub struct RunLook {
    /// The run.
    pub run: RunId,
    /// When it was made, milliseconds since the Unix epoch.
    pub created_unix_ms: u64,
    /// The version of its settings.
    pub settings_version: u64,
    /// Rollouts that are not finalised.
    pub open_rollouts: u64,
    /// Groups of which something may still come.
    pub open_groups: u64,
    /// Finalised rollouts that are not retired.
    pub finalised_rollouts: u64,
    /// Retired rollouts.
    pub retired_rollouts: u64,
    /// Rollouts that ended without rows, by reason.
    pub gone_rollouts: Vec<(EndReason, u64)>,
    /// What became of its calls, by policy.
    pub calls: Vec<(Name, CallCounts)>,
    /// What became of its rows, by consumer group.
    pub rows: Vec<RowsOf>,
    /// The drift of its finalised rollouts, by agent (none: those after the first few) and kind.
    pub drifts: Vec<(Option<AgentId>, DriftKind, DriftCount)>,
    /// Requests that were refused.
    pub refused_requests: u64,
}

/// What became of the rows of one consumer group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowsOf {
    /// The consumer group.
    pub consumer_group: String,
    /// The policy that it takes; none: every trained one.
    pub policy: Option<String>,
    /// Its ledger.
    pub rows: RowCounts,
}

/// A group, for who looks. Of each kind of members only the first few are listed.
#[derive(Clone, Debug)]
pub struct GroupLook {
    /// The group.
    pub group: GroupId,
    /// How many rollouts it is to have, if that was said.
    pub size: Option<u32>,
    /// When its first rollout was opened, milliseconds since the Unix epoch.
    pub opened_unix_ms: u64,
    /// Members that take events, and how many.
    pub open: (Vec<RolloutId>, u32),
    /// Members whose rows are made, and how many.
    pub finalised: (Vec<RolloutId>, u32),
    /// Members that are out for good, with attempt and reason, and how many.
    pub out: (Vec<(RolloutId, u32, String)>, u32),
    /// Places that nobody took, or that wait for another attempt.
    pub open_places: u32,
    /// Whether nothing more can come of it.
    pub is_over: bool,
    /// Its release, if that has come.
    pub release: Option<Arc<Release>>,
    /// The rewards of its finalised members by now, if its release is awaited.
    pub statistics: Statistics,
    /// In how many milliseconds its time is over; none: it is released, or is not to be.
    pub timeout_after_ms: Option<u64>,
}

/// A consumer group, for who looks.
#[derive(Clone, Debug)]
pub struct ConsumerGroupLook {
    /// Its name.
    pub name: ConsumerGroupId,
    /// What it is.
    pub definition: GroupDefinition,
    /// It in numbers.
    pub stats: GroupStats,
    /// Its consumers, by name.
    pub consumers: Vec<ConsumerFigures>,
    /// The first few units that are undeliverable, and how many there are.
    pub undeliverable: (Vec<String>, u64),
    /// How often it was sought back.
    pub seek_count: u64,
    /// How many steps were frozen, and those that are not acknowledged; none, if units do not go out in steps.
    pub steps: Option<(u64, Vec<OpenStep>)>,
    /// What became of the calls that it was given, by policy.
    pub calls: Vec<(Name, CallCounts)>,
    /// What became of its rows.
    pub rows: RowsOf,
    /// How its run's rollouts stand.
    pub rollouts: RolloutsNow,
    /// Its run's settings list it as required.
    pub required: bool,
    /// In how many milliseconds it expires, if nobody subscribes.
    pub expires_after_ms: Option<u64>,
}

/// A consumer, for who looks.
#[derive(Clone, Debug)]
pub struct ConsumerFigures {
    /// What the queue says.
    pub facts: ConsumerFacts,
    /// What it waits for.
    pub waiting: Option<WaitingFor>,
}

/// How many rollouts and groups of a run stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RolloutsNow {
    /// Open rollouts of the run.
    pub open: u64,
    /// Those that are sealed.
    pub sealed: u64,
    /// Those that are rewarded.
    pub rewarded: u64,
    /// Those that are both, and miss calls.
    pub incomplete: u64,
    /// Groups of which something may still come.
    pub open_groups: u64,
    /// Finalised rollouts that await the release of their group.
    pub await_release: u64,
}

/// Why nothing goes out to a consumer.
#[derive(Clone, Debug)]
pub struct Waiting {
    /// What the queue says.
    pub queue: WaitingFor,
    /// How the run's rollouts stand.
    pub rollouts: RolloutsNow,
}

impl RunState {
    pub(super) fn look(&self, run: &RunId) -> RunLook {
        let counts = &self.shared.counts;
        let lasting = self.queue.groups().filter(|(_, group)| !group.definition().ephemeral);
        RunLook {
            run: run.clone(),
            created_unix_ms: self.shared.created_unix_ms,
            settings_version: self.settings_version(),
            open_rollouts: counts.open.load(Ordering::Relaxed),
            open_groups: self.groups.open_count(),
            finalised_rollouts: self.retained.len() as u64,
            retired_rollouts: self.ledger.retired_rollouts,
            gone_rollouts: self.ledger.gone_rollouts(),
            calls: self.calls(),
            rows: lasting.map(|(name, group)| rows_of(name, group)).collect(),
            drifts: self.ledger.drifts(),
            refused_requests: counts.refused.load(Ordering::Relaxed),
        }
    }

    fn rollouts_now(&self) -> RolloutsNow {
        let counts = &self.shared.counts;
        RolloutsNow {
            open: counts.open.load(Ordering::Relaxed),
            sealed: counts.sealed.load(Ordering::Relaxed),
            rewarded: counts.rewarded.load(Ordering::Relaxed),
            incomplete: counts.incomplete.load(Ordering::Relaxed),
            open_groups: self.groups.open_count(),
            await_release: self.groups.held_rollouts(),
        }
    }

    fn consumer_group(
        &self,
        id: ConsumerGroupId,
        group: &ConsumerGroup<u64, UnitRows>,
        now_ms: u64,
    ) -> ConsumerGroupLook {
        let mut consumers: Vec<_> = group
            .consumers()
            .map(|facts| ConsumerFigures { waiting: group.waiting_for(facts.consumer), facts })
            .collect();
        consumers.sort_by(|one, other| one.facts.name.cmp(&other.facts.name));
        let text = |unit: &UnitId| unit.as_str().to_owned();
        let takes_steps = group.takes_steps();
        let (undeliverable, count): (Vec<_>, _) = match takes_steps {
            true => {
                let listed = group.undeliverable_steps().take(limits::LISTED_IDS_MAX).map(text);
                (listed.collect(), group.undeliverable_steps().count() as u64)
            }
            false => {
                let listed = group.undeliverable().take(limits::LISTED_IDS_MAX).map(text);
                (listed.collect(), group.undeliverable().len() as u64)
            }
        };
        ConsumerGroupLook {
            calls: self.ledger.calls_given(id.as_str()),
            rows: rows_of(id.as_str(), group),
            required: self.settings_now().requires(&id),
            expires_after_ms: self.expires_ms(&id).map(|expires_ms| expires_ms.saturating_sub(now_ms)),
            name: id,
            definition: group.definition().clone(),
            stats: group.stats(now_ms),
            consumers,
            undeliverable: (undeliverable, count),
            seek_count: group.seek_count(),
            steps: takes_steps.then(|| {
                let listed = group.open_steps().into_iter().take(limits::OPEN_STEPS_LISTED_MAX);
                (group.next_step_index(), listed.collect())
            }),
            rollouts: self.rollouts_now(),
        }
    }
}

fn rows_of(name: &str, group: &ConsumerGroup<u64, UnitRows>) -> RowsOf {
    let rows = row_counts(&group.row_states());
    RowsOf { consumer_group: name.to_owned(), policy: group.definition().policy.clone(), rows }
}

impl Sequencer {
    /// Every group, with its run.
    pub(in crate::store) fn all_groups(&self) -> impl Iterator<Item = (&RunId, &GroupId, &Group)> {
        self.runs.iter().flat_map(|(run, state)| state.groups.iter().map(move |(id, group)| (run, id, group)))
    }

    /// Every consumer group that lasts: its run and name, and what it is.
    pub(in crate::store) fn all_consumer_groups(
        &self,
    ) -> impl Iterator<Item = (&RunId, &str, &ConsumerGroup<u64, UnitRows>)> {
        self.runs.iter().flat_map(|(run, state)| {
            let lasting = state.queue.groups().filter(|(_, group)| !group.definition().ephemeral);
            lasting.map(move |(name, group)| (run, name, group))
        })
    }

    /// Shows something. Who asked may be gone by now; then nobody wants the answer.
    pub(super) fn look(&self, look: Look) {
        match look {
            Look::Runs(after, most, reply) => {
                let start = after.as_ref().map_or(Unbounded, Excluded);
                let runs = self.runs.range::<RunId, _>((start, Unbounded)).take(most);
                drop(reply.send(runs.map(|(run, state)| state.look(run)).collect()));
            }
            Look::Run(run, reply) => drop(reply.send(self.run_state(&run).map(|state| state.look(&run)))),
            Look::Rollouts(run, group, after, most, reply) => {
                let ids = self.run_state(&run).map(|state| rollout_ids(state, group.as_ref(), after.as_ref(), most));
                drop(reply.send(ids));
            }
            Look::Groups(run, after, most, open_only, reply) => {
                drop(reply.send(self.group_page(&run, after.as_ref(), most, open_only)));
            }
            Look::TheseGroups(run, groups, reply) => {
                let show = |state: &RunState| {
                    let there = groups.iter().filter_map(|id| Some((id, state.groups.kept(id)?)));
                    there.map(|(id, kept)| self.group(&run, id, kept)).collect()
                };
                drop(reply.send(self.run_state(&run).map(show)));
            }
            Look::ConsumerGroups(run, after, most, reply) => {
                let page = self.run_state(&run).map(|state| self.consumer_group_page(state, after.as_ref(), most));
                drop(reply.send(page));
            }
        }
    }

    fn run_state(&self, run: &RunId) -> Result<&RunState, Refusal> {
        self.runs.get(run).ok_or_else(|| run_not_found(run))
    }

    fn group_page(
        &self,
        run: &RunId,
        after: Option<&GroupId>,
        most: usize,
        open_only: bool,
    ) -> Result<GroupPage, Refusal> {
        let state = self.run_state(run)?;
        let (mut page, mut members) = (Vec::new(), 0);
        for (id, kept) in state.groups.after(after) {
            let is_shown = !open_only || !kept.group.is_over();
            if is_shown {
                page.push(self.group(run, id, kept));
            }
            members += if is_shown { kept.group.member_count() } else { 1 };
            if page.len() == most || members >= limits::PAGE_MEMBERS_LOOKED_AT_MAX {
                return Ok((page, Some(id.clone())));
            }
        }
        Ok((page, None))
    }

    fn consumer_group_page(&self, state: &RunState, after: Option<&ConsumerGroupId>, most: usize) -> ConsumerGroupPage {
        let now_ms = self.store.clock.now_ms();
        let (mut page, mut members) = (Vec::new(), 0);
        for (name, group) in state.queue.groups_after(after.map(ConsumerGroupId::as_str)) {
            // Whoever made the group had its name checked.
            let Ok(id) = ConsumerGroupId::parse(name) else { continue };
            members += 1 + group.consumer_ids().count();
            page.push(state.consumer_group(id.clone(), group, now_ms));
            if page.len() == most || members >= limits::PAGE_CONSUMERS_LOOKED_AT_MAX {
                return (page, Some(id));
            }
        }
        (page, None)
    }

    fn group(&self, run: &RunId, id: &GroupId, kept: &KeptGroup) -> GroupLook {
        let mut look = GroupLook {
            group: id.clone(),
            size: kept.group.size(),
            opened_unix_ms: kept.opened_unix_ms,
            open: (Vec::new(), 0),
            finalised: (Vec::new(), 0),
            out: (Vec::new(), 0),
            open_places: 0,
            is_over: kept.group.is_over(),
            release: kept.group.release().cloned(),
            statistics: kept.group.statistics(),
            timeout_after_ms: kept.deadline_ms().map(|at_ms| at_ms.saturating_sub(self.store.clock.now_ms())),
        };
        let list = |(ids, count): &mut (Vec<RolloutId>, u32), rollout: &RolloutId| {
            *count += 1;
            if ids.len() < limits::LISTED_IDS_MAX {
                ids.push(rollout.clone());
            }
        };
        for (rollout, attempt, member) in kept.group.members() {
            match member {
                Member::Open => list(&mut look.open, rollout),
                Member::Finalised => list(&mut look.finalised, rollout),
                Member::Out => {
                    let (listed, count) = &mut look.out;
                    *count += 1;
                    if listed.len() < limits::LISTED_IDS_MAX {
                        listed.push((rollout.clone(), attempt, self.reason_of_end(run, rollout, attempt)));
                    }
                }
                Member::WillRetry => look.open_places += 1,
            }
        }
        let members = u32::try_from(kept.group.member_count()).unwrap_or(u32::MAX);
        look.open_places += look.size.map_or(0, |size| size.saturating_sub(members));
        look
    }

    /// Why an attempt ended, as far as that is remembered.
    pub(super) fn reason_of_end(&self, run: &RunId, rollout: &RolloutId, attempt: u32) -> String {
        let Some(entry) = self.store.entry(&RolloutKey { run: run.clone(), rollout: rollout.clone() }) else {
            return String::new();
        };
        match &*entry.slot.lock() {
            Slot::Ended(ended, _) if ended.attempt == attempt => ended.reason.clone(),
            Slot::Ended(..) | Slot::Live(_) | Slot::Removed => String::new(),
        }
    }

    /// What a consumer waits for.
    pub(super) fn waiting(&mut self, id: ConsumerId) -> Option<Waiting> {
        self.tell_owed(id);
        let consumer = self.consumers.get(&id)?;
        let run = self.runs.get(&consumer.run)?;
        let name: &ConsumerGroupId = &consumer.consumer_group;
        let queue = run.queue.group(name.as_str())?.waiting_for(id)?;
        Some(Waiting { queue, rollouts: run.rollouts_now() })
    }
}

/// Ids of rollouts, of a group if one is said, after this one.
fn rollout_ids(state: &RunState, group: Option<&GroupId>, after: Option<&RolloutId>, most: usize) -> Vec<RolloutId> {
    let Some(group) = group else {
        let start = after.map_or(Unbounded, Excluded);
        return state.rollouts.range::<RolloutId, _>((start, Unbounded)).take(most).cloned().collect();
    };
    let members = state.groups.get(group).into_iter().flat_map(|group| group.members_after(after));
    members.take(most).cloned().collect()
}
