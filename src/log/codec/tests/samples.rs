//! One record of each kind and form, written down.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::forest::CallRecord;
use crate::forest::call::{CallFacts, Delta, Link, RecordedPrompt, VersionSpan};
use crate::forest::digest::Digest;
use crate::forest::plan::SharedCallOwner;
use crate::group::{GroupRules, Member};
use crate::ids::{AgentId, CallId, ConsumerGroupId, GroupId, Name, RolloutId, RolloutRef, RunId};
use crate::log::totals::{CallTotals, ConsumerGroupTotals, GoneTotals, PolicyTotals, RunTotals};
use crate::log::{CopiedUnits, CopyBegins, EndedMember, EndedRollout, GroupSnapshot, Position, Record, RetiredFor};
use crate::queue::{DropReason, GroupDefinition, SettledSum, UnitId, UnitKind};
use crate::rollout::credits::{Credit, CreditTarget, CreditValues};
use crate::rollout::event::{
    AgentEnd, AgentOrigin, AgentStart, AgentStatus, Decision, DiscardedBy, Disposition, Open, Reward, RolloutRecord,
    Seal,
};
use crate::rollout::run_settings::{ConsumerGroupSettings, RunSettings, StartPosition, Unit};
use crate::rollout::settings::{
    AgentsWithoutListRule, BrokenLinkRule, MissingCallRule, NonfiniteLogprobsRule, RolloutSettings, RowWeight,
    UnreadAnswersRule,
};

pub(super) fn run() -> RunId {
    RunId::parse("run-1").unwrap()
}

fn call(id: &str) -> CallId {
    CallId::parse(id).unwrap()
}

fn agent(id: &str) -> AgentId {
    AgentId::parse(id).unwrap()
}

pub(super) fn trainer() -> ConsumerGroupId {
    ConsumerGroupId::parse("trainer").unwrap()
}

fn rollout(record: RolloutRecord) -> Record {
    Record::Rollout { run: run(), rollout: RolloutId::parse("g7-r3").unwrap(), attempt: 2, record }
}

/// A call of usual facts, with so many new ids in its prompt and so many generated.
pub(super) fn call_of(new: u32, generated: usize) -> Record {
    let generation: Vec<u32> = (0..generated).map(|token| 100_000 + token as u32).collect();
    let facts = CallFacts {
        call_id: call("main-17"),
        agent_id: agent("main"),
        parent_agent_id: None,
        sequence: 17,
        link: Link::Infer,
        kind: Name::literal("turn"),
        policy: Name::literal("main"),
        versions: vec![VersionSpan { start: 0, end: generated as u32, version: 312 }],
        model: Some(Name::literal("some-model-32b")),
        logprobs: Some(generation.iter().map(|token| -1.0 / *token as f32).collect()),
        generation,
        train: true,
        finish_reason: Some(Name::literal("stop")),
        times_unix_ms: (Some(1_790_000_000_000), Some(1_790_000_004_000)),
    };
    let prompt = RecordedPrompt::Known { base: Some((call("main-16"), 20_000)), suffix: (0..new).collect() };
    rollout(RolloutRecord::Call(CallRecord::New(Box::new((facts, prompt)))))
}

/// What newer builds of version 1 write besides: new kinds, and new fields of the others.
pub(super) fn later_samples() -> Vec<(&'static str, Record)> {
    let (run, consumer_group) = (run(), trainer());
    let rollouts = vec![(RolloutId::parse("g7-r3").unwrap(), 2), (RolloutId::parse("r4").unwrap(), 0)];
    let mut later = vec![
        ("rollouts_retired", Record::RolloutsRetired { run: run.clone(), rollouts, reason: RetiredFor::Unclaimed }),
        ("consumer_group_expired", expired(&run, &consumer_group)),
        ("sought", Record::Sought { run, consumer_group: consumer_group.clone(), to: Position(4711) }),
    ];
    later.extend(of_credits().into_iter().map(|(name, record)| (name, rollout(record))));
    for (name, record) in samples() {
        if name == "run"
            && let Record::Run { settings, .. } = &record
        {
            let opened = samples().into_iter().find(|(name, _)| *name == "rollout_opened").unwrap();
            later.extend(super::groups::group_samples(settings, opened.1));
            later.extend(super::steps::step_samples(settings));
        }
        if let Record::Run { run, settings_version, settings } = record {
            let settings = RunSettings {
                required_consumer_groups: vec![consumer_group.clone()],
                retention_ms: 60_000,
                unclaimed_retention_ms: 0,
                unclaimed_retention_bytes: Some(1 << 30),
                consumer_group_idle_expiry_ms: 3_600_000,
                ..RunSettings::clone(&settings)
            };
            let plain = Arc::clone(&settings.rollout);
            let credited = RunSettings { rollout: Arc::new(credited(&settings.rollout)), ..settings.clone() };
            let (one, settings) = (run.clone(), Arc::new(settings));
            later.push(("run_that_retains", Record::Run { run, settings_version, settings }));
            let settings = Arc::new(credited);
            later.push((
                "run_with_rules_of_credit",
                Record::Run { run: one.clone(), settings_version, settings: settings.clone() },
            ));
            let mut bounded = RunSettings::clone(&settings);
            bounded.rollout = Arc::clone(&plain);
            bounded.consumer_groups[0].1.max_staleness_versions = Some(4);
            let mut paced = RunSettings::clone(&settings);
            (paced.rollout, paced.max_lead_groups) = (plain, Some(64));
            let (run, paced) = (one.clone(), Arc::new(paced));
            later.push(("run_with_a_pace", Record::Run { run, settings_version, settings: paced }));
            let settings = Arc::new(bounded);
            later.push(("run_with_a_bound_of_staleness", Record::Run { run: one, settings_version, settings }));
        } else if let Record::ConsumerGroup { run, consumer_group, mut definition, from_earliest } = record {
            definition.max_staleness_versions = Some(4);
            let record = Record::ConsumerGroup { run, consumer_group, definition, from_earliest };
            later.push(("consumer_group_with_a_bound_of_staleness", record));
        } else if let Record::RunSnapshot { run, settings_version, settings, created_unix_ms, mut consumer_groups } =
            record
        {
            consumer_groups.iter_mut().for_each(|group| (group.made_at, group.seek_count) = (Position(17), 2));
            let record = Record::RunSnapshot { run, settings_version, settings, created_unix_ms, consumer_groups };
            later.push(("run_snapshot_after_seeks", record.clone()));
            later.push(("run_snapshot_after_steps", super::steps::after_steps(record)));
        } else if let Record::RolloutCopyBegins(mut begins) = record {
            let history = (UnitId::from("run-1/g7-r3/2/main/a"), vec![40, 50, 60]);
            begins.given_to[0].histories.push(history);
            later.push(("rollout_copy_begins_with_histories", Record::RolloutCopyBegins(begins.clone())));
            begins.settings = Arc::new(credited(&begins.settings));
            later.push(("rollout_copy_begins_with_rules_of_credit", Record::RolloutCopyBegins(begins)));
        } else if let Record::RunTotals { run, mut totals } = record {
            (totals.consumer_groups[0].forgotten_through, totals.consumer_groups[0].changed_at) = (99, 120);
            totals.consumer_groups[0].blurred = Some((50, 70));
            later.push(("run_totals_with_what_is_forgotten", Record::RunTotals { run, totals }));
        }
    }
    later
}

fn expired(run: &RunId, consumer_group: &ConsumerGroupId) -> Record {
    Record::ConsumerGroupExpired { run: run.clone(), consumer_group: consumer_group.clone() }
}

fn credited(settings: &RolloutSettings) -> RolloutSettings {
    RolloutSettings {
        untrained_kinds: vec![Name::literal("summary"), Name::literal("probe")],
        unread_answers: UnreadAnswersRule::Context,
        row_weight: RowWeight::RolloutTokens,
        ..settings.clone()
    }
}

fn of_credits() -> Vec<(&'static str, RolloutRecord)> {
    let all = CreditValues { train: Some(false), reward: Some(-0.0), advantage_scale: Some(0.5) };
    let of_call = Credit { target: CreditTarget::Call(call("c2")), values: all };
    let train = CreditValues { train: Some(true), ..CreditValues::default() };
    let of_agent = Credit { target: CreditTarget::Agent(agent("sub")), values: train };
    let reward = Reward { value: 0.5, components: BTreeMap::new() };
    vec![
        ("credit", RolloutRecord::Credit(of_call.clone())),
        ("finish_with_credits", RolloutRecord::Finish(None, Some(reward), vec![of_call, of_agent])),
    ]
}

/// Every record and every form of what happens to a rollout, by name, as the first build wrote them.
pub(super) fn samples() -> Vec<(&'static str, Record)> {
    let mut samples = of_runs();
    samples.extend(of_rollouts().into_iter().map(|(name, record)| (name, rollout(record))));
    samples.extend(of_consumer_groups());
    samples.extend(of_snapshots());
    samples.extend(of_copies());
    samples
}

fn of_runs() -> Vec<(&'static str, Record)> {
    let rollout = RolloutSettings {
        trained_policies: vec![Name::literal("main"), Name::literal("judge")],
        default_policy: Name::literal("main"),
        shared_call_owner: SharedCallOwner::FirstLeaf,
        broken_link: BrokenLinkRule::Discard,
        agents_without_list: AgentsWithoutListRule::Keep,
        missing_call: MissingCallRule::Finalise,
        require_logprobs: true,
        nonfinite_logprobs: NonfiniteLogprobsRule::Context,
        vocabulary_limit: Some(151_936),
        idle_timeout_ms: 21_600_000,
        missing_call_timeout_ms: 600_000,
        missing_parent_timeout_ms: 600_001,
        untrained_kinds: Vec::new(),
        unread_answers: UnreadAnswersRule::Train,
        row_weight: RowWeight::One,
    };
    let group = ConsumerGroupSettings {
        policy: Some(Name::literal("main")),
        unit: Unit::Rollout,
        step: None,
        max_row_tokens: Some(32_768),
        max_staleness_versions: None,
        start: StartPosition::Latest,
    };
    let settings = RunSettings {
        rollout: Arc::new(rollout),
        max_deliveries: 5,
        lease_ms: 3_600_000,
        tombstone_retention_ms: 259_200_000,
        consumer_groups: vec![(trainer(), group)],
        ..RunSettings::with_defaults()
    };
    let (rollout, group) = (RolloutId::parse("g7-r3").unwrap(), GroupId::parse("g7").unwrap());
    let opened = Record::RolloutOpened {
        run: run(),
        rollout,
        attempt: 2,
        group: Some(group.clone()),
        settings_version: 3,
        group_size: None,
        group_rules: None,
    };
    vec![
        ("run", Record::Run { run: run(), settings_version: 3, settings: Arc::new(settings) }),
        ("run_deleted", Record::RunDeleted { run: run() }),
        ("group_size", Record::GroupSize { run: run(), group, size: 8 }),
        ("rollout_opened", opened.clone()),
        ("rollout_opened_in_a_group_of_known_size", with_size(opened)),
    ]
}

fn with_size(mut opened: Record) -> Record {
    if let Record::RolloutOpened { group_size, .. } = &mut opened {
        *group_size = Some(8);
    }
    opened
}

pub(super) fn with_rules(mut opened: Record, rules: GroupRules) -> Record {
    if let Record::RolloutOpened { group_rules, .. } = &mut opened {
        *group_rules = Some(rules);
    }
    opened
}

fn new_call() -> CallRecord {
    let facts = CallFacts {
        call_id: call("c2"),
        agent_id: agent("sub"),
        parent_agent_id: Some(agent("main")),
        sequence: 2,
        link: Link::Parent(call("c1")),
        kind: Name::literal("turn"),
        policy: Name::literal("main"),
        versions: vec![VersionSpan { start: 0, end: 2, version: 312 }, VersionSpan { start: 2, end: 3, version: 313 }],
        model: Some(Name::literal("model")),
        generation: vec![7, 151_935, u32::MAX],
        logprobs: Some(vec![-0.25, f32::from_bits(0x7fc0_1234), -0.0]),
        train: true,
        finish_reason: Some(Name::literal("stop")),
        times_unix_ms: (Some(1_790_000_000_000), Some(1_790_000_004_000)),
    };
    let prompt = RecordedPrompt::Known { base: Some((call("c1"), 640)), suffix: vec![1, 2] };
    CallRecord::New(Box::new((facts, prompt)))
}

fn waiting_call() -> CallRecord {
    let facts = CallFacts {
        call_id: call("c3"),
        agent_id: agent("main"),
        parent_agent_id: None,
        sequence: 0,
        link: Link::Root,
        kind: Name::literal("probe"),
        policy: Name::literal("judge"),
        versions: Vec::new(),
        model: None,
        generation: Vec::new(),
        logprobs: None,
        train: false,
        finish_reason: None,
        times_unix_ms: (None, None),
    };
    let digest = Digest(*b"0123456789abcdef");
    let delta = Delta { base: call("c9"), base_length: 64, digest, suffix: vec![5] };
    CallRecord::New(Box::new((facts, RecordedPrompt::Waiting(delta))))
}

fn later_prompt() -> CallRecord {
    CallRecord::Prompt(call("c3"), RecordedPrompt::Known { base: None, suffix: vec![3, 4, 5] })
}

fn of_rollouts() -> Vec<(&'static str, RolloutRecord)> {
    let tags = BTreeMap::from([(Name::literal("task"), "sort a list".to_owned()), (Name::literal("t"), String::new())]);
    let start = AgentStart {
        agent_id: agent("sub"),
        resumption: 1,
        parent_agent_id: Some(agent("main")),
        spawning_call_id: Some(call("c1")),
        origin: Some(AgentOrigin::ForkOf(call("c1"))),
        profile: Some(Name::literal("explorer")),
        model: Some(Name::literal("model")),
    };
    let end = AgentEnd {
        agent_id: agent("sub"),
        resumption: 1,
        status: AgentStatus::BudgetExhausted,
        kept: Some(vec![call("c2"), call("c3")]),
        answers_read: vec![agent("other")],
    };
    let kept = BTreeMap::from([(agent("main"), vec![call("c1")]), (agent("sub"), Vec::new())]);
    let seal = Seal { kept: Some(kept), expected_calls: Some(3) };
    let components = BTreeMap::from([(Name::literal("format"), -0.0), (Name::literal("tests"), 0.75)]);
    let reward = Reward { value: 0.5, components };
    let discard = RolloutRecord::Discard {
        reason: "the sandbox died".to_owned(),
        disposition: Disposition::WillRetry,
        by: DiscardedBy::Harness,
    };
    let parent = |prompt| RolloutRecord::ParentAgent { call: call("c2"), parent_agent_id: agent("main"), prompt };
    vec![
        ("open", RolloutRecord::Open(Open { group_size: Some(8), tags })),
        ("group", RolloutRecord::Group(GroupId::parse("g7").unwrap())),
        ("new_call", RolloutRecord::Call(new_call())),
        ("waiting_call", RolloutRecord::Call(waiting_call())),
        ("later_prompt", RolloutRecord::Call(later_prompt())),
        ("parent_agent", parent(None)),
        ("parent_agent_with_prompt", parent(Some(later_prompt()))),
        ("agent_start", RolloutRecord::AgentStart(start)),
        ("agent_end", RolloutRecord::AgentEnd(end)),
        ("seal_and_reward", RolloutRecord::Finish(Some(seal), Some(reward), Vec::new())),
        ("nothing_said_at_the_end", RolloutRecord::Finish(None, None, Vec::new())),
        ("discard", discard),
        ("conflict", RolloutRecord::Conflict(call("c2"))),
        ("decision", RolloutRecord::Decision(Decision::MissingParentsGivenUp)),
    ]
}

fn of_consumer_groups() -> Vec<(&'static str, Record)> {
    let definition = GroupDefinition {
        policy: Some("main".to_owned()),
        unit: UnitKind::Rollout,
        step: None,
        max_row_tokens: Some(32_768),
        max_staleness_versions: None,
        ephemeral: true,
        max_deliveries: 5,
    };
    let unit = UnitId::from("run-1/g7-r3/2/main");
    let (run, consumer_group) = (run(), trainer());
    vec![
        (
            "consumer_group",
            Record::ConsumerGroup {
                run: run.clone(),
                consumer_group: consumer_group.clone(),
                definition,
                from_earliest: true,
            },
        ),
        (
            "acknowledged",
            Record::Acknowledged {
                run: run.clone(),
                consumer_group: consumer_group.clone(),
                units: vec![unit.clone(), UnitId::from("run-1/g7-r4/0/main")],
            },
        ),
        (
            "unit_dropped",
            Record::UnitDropped {
                run: run.clone(),
                consumer_group: consumer_group.clone(),
                unit: unit.clone(),
                reason: DropReason::Operator,
            },
        ),
        ("unit_released", Record::UnitReleased { run, consumer_group, unit }),
    ]
}

fn of_snapshots() -> Vec<(&'static str, Record)> {
    let definition = GroupDefinition {
        policy: None,
        unit: UnitKind::Row,
        step: None,
        max_row_tokens: None,
        max_staleness_versions: None,
        ephemeral: false,
        max_deliveries: 5,
    };
    let Some((_, Record::Run { run, settings_version, settings })) = of_runs().into_iter().next() else {
        panic!("the first is a run");
    };
    let ended = |rollout: &str, retired, group| EndedRollout {
        rollout: RolloutId::parse(rollout).unwrap(),
        attempt: 2,
        retired,
        reason: if retired { "acknowledged" } else { "idle_timeout" }.to_owned(),
        is_final: retired,
        group,
    };
    let member = EndedMember { group: GroupId::parse("g7").unwrap(), size: Some(8), member: Member::WillRetry };
    let rollouts = vec![ended("g7-r3", false, Some(member)), ended("r4", true, None)];
    let group = GroupSnapshot {
        consumer_group: trainer(),
        definition,
        made_at: Position(0),
        seek_count: 0,
        next_step_index: 0,
    };
    let consumer_groups = vec![group];
    let created_unix_ms = 1_790_000_000_000;
    vec![
        ("snapshot_begins", Record::SnapshotBegins { runs: 1 }),
        (
            "run_snapshot",
            Record::RunSnapshot { run: run.clone(), settings_version, settings, created_unix_ms, consumer_groups },
        ),
        ("tombstones", Record::Tombstones { run: run.clone(), rollouts }),
        ("run_totals", Record::RunTotals { run, totals: totals() }),
    ]
}

fn of_copies() -> Vec<(&'static str, Record)> {
    let Some((_, Record::Run { run, settings_version, settings })) = of_runs().into_iter().next() else {
        panic!("the first is a run");
    };
    let rollout = RolloutId::parse("g7-r3").unwrap();
    let units = CopiedUnits {
        consumer_group: trainer(),
        acknowledged: vec![UnitId::from("run-1/g7-r3/2/main/a")],
        dropped: vec![(UnitId::from("run-1/g7-r3/2/main/b"), DropReason::Operator)],
        histories: Vec::new(),
    };
    let record = RolloutRecord::Conflict(call("c2"));
    let begins = Record::RolloutCopyBegins(Box::new(CopyBegins {
        reference: RolloutRef {
            run: run.clone(),
            group: Some(GroupId::parse("g7").unwrap()),
            rollout: rollout.clone(),
            attempt: 2,
        },
        settings_version,
        settings: Arc::clone(&settings.rollout),
        opened_unix_ms: 1_790_000_000_000,
        records: 17,
        given_to: vec![units],
        finalised: None,
    }));
    vec![
        ("rollout_copy_begins", begins),
        ("rollout_copied", Record::RolloutCopied { run, rollout, attempt: 2, record }),
    ]
}

fn totals() -> RunTotals {
    let of_main = PolicyTotals { policy: Name::literal("main"), trained: 5, context: 2, too_long: 1 };
    let calls = CallTotals { empty: 1, not_kept: 3, kept: 9, policies: vec![of_main] };
    let sum = |units| SettledSum { units, tokens: 640, rows: units };
    let of_group = ConsumerGroupTotals {
        consumer_group: trainer(),
        calls: calls.clone(),
        acknowledged: sum(4),
        dropped: vec![(DropReason::Operator, sum(1))],
        forgotten_through: 0,
        changed_at: 0,
        blurred: None,
    };
    let gone = GoneTotals { reason: "idle_timeout".to_owned(), rollouts: 2, calls: 7 };
    RunTotals { calls, gone: vec![gone], retired_rollouts: 6, consumer_groups: vec![of_group] }
}
