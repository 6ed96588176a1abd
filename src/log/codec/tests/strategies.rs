//! Arbitrary records: every form, every field there and not there, every bit of every number. Each strategy is boxed: the
//! type of a whole record's takes minutes to compile.

use std::sync::Arc;

use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

use super::groups::{group_rules, of_groups};
use crate::forest::CallRecord;
use crate::forest::call::{CallFacts, Delta, Link, RecordedPrompt, VersionSpan};
use crate::forest::digest::Digest;
use crate::forest::plan::SharedCallOwner;
use crate::group::Member;
use crate::ids::{IdentifierError, RolloutRef};
use crate::log::totals::{CallTotals, ConsumerGroupTotals, GoneTotals, PolicyTotals, RunTotals};
use crate::log::{CopiedUnits, CopyBegins, EndedMember, EndedRollout, GroupSnapshot, Position, Record, RetiredFor};
use crate::queue::{CutVersion, DropReason, FrozenStep, GroupDefinition, SettledSum, StepDefinition, UnitId, UnitKind};
use crate::rollout::credits::{Credit, CreditTarget, CreditValues};
use crate::rollout::event::{
    AgentEnd, AgentOrigin, AgentStart, AgentStatus, Decision, DiscardedBy, Disposition, Open, Reward, RolloutRecord,
    Seal,
};
use crate::rollout::run_settings::{ConsumerGroupSettings, RunSettings, StartPosition, StepSettings, Unit};
use crate::rollout::settings::{
    AgentsWithoutListRule, BrokenLinkRule, MissingCallRule, NonfiniteLogprobsRule, RolloutSettings, RowWeight,
    UnreadAnswersRule,
};

/// An identifier of a type, by its parse function.
pub(super) fn id<T: std::fmt::Debug + 'static>(parse: fn(&str) -> Result<T, IdentifierError>) -> BoxedStrategy<T> {
    "[ -~é樹]{1,12}".prop_filter_map("an identifier", move |text| parse(&text).ok()).boxed()
}

macro_rules! id {
    ($type:ident) => {
        id(crate::ids::$type::parse)
    };
}

fn text() -> BoxedStrategy<String> {
    "\\PC{0,12}".boxed()
}

fn tokens() -> BoxedStrategy<Vec<u32>> {
    vec(any::<u32>(), 0..70).boxed()
}

fn number() -> BoxedStrategy<f64> {
    any::<u64>().prop_map(f64::from_bits).boxed()
}

fn link() -> BoxedStrategy<Link> {
    prop_oneof![Just(Link::Infer), Just(Link::Root), id!(CallId).prop_map(Link::Parent)].boxed()
}

fn span() -> BoxedStrategy<VersionSpan> {
    any::<(u32, u32, u64)>().prop_map(|(start, end, version)| VersionSpan { start, end, version }).boxed()
}

pub(super) fn call_facts() -> BoxedStrategy<CallFacts> {
    let who = (id!(CallId), id!(AgentId), option::of(id!(AgentId)), any::<u64>(), link());
    let what = (id!(Name), id!(Name), vec(span(), 0..3), option::of(id!(Name)), option::of(id!(Name)));
    let logprobs = option::of(vec(any::<u32>().prop_map(f32::from_bits), 0..70));
    let rest = (tokens(), logprobs, any::<bool>(), any::<(Option<u64>, Option<u64>)>());
    (who, what, rest)
        .prop_map(|(who, what, rest)| {
            let (call_id, agent_id, parent_agent_id, sequence, link) = who;
            let (kind, policy, versions, model, finish_reason) = what;
            let (generation, logprobs, train, times_unix_ms) = rest;
            CallFacts {
                call_id,
                agent_id,
                parent_agent_id,
                sequence,
                link,
                kind,
                policy,
                versions,
                model,
                generation,
                logprobs,
                train,
                finish_reason,
                times_unix_ms,
            }
        })
        .boxed()
}

pub(super) fn delta() -> BoxedStrategy<Delta> {
    (id!(CallId), any::<u32>(), any::<[u8; 16]>(), tokens())
        .prop_map(|(base, base_length, digest, suffix)| Delta { base, base_length, digest: Digest(digest), suffix })
        .boxed()
}

pub(super) fn prompt() -> BoxedStrategy<RecordedPrompt> {
    prop_oneof![
        (option::of((id!(CallId), any::<u32>())), tokens())
            .prop_map(|(base, suffix)| RecordedPrompt::Known { base, suffix }),
        delta().prop_map(RecordedPrompt::Waiting),
    ]
    .boxed()
}

fn call() -> BoxedStrategy<CallRecord> {
    prop_oneof![
        (call_facts(), prompt()).prop_map(|new| CallRecord::New(Box::new(new))),
        (id!(CallId), prompt()).prop_map(|(call, prompt)| CallRecord::Prompt(call, prompt)),
    ]
    .boxed()
}

pub(super) fn open() -> BoxedStrategy<Open> {
    (any::<Option<u32>>(), btree_map(id!(Name), text(), 0..4))
        .prop_map(|(group_size, tags)| Open { group_size, tags })
        .boxed()
}

pub(super) fn agent_start() -> BoxedStrategy<AgentStart> {
    let origin = option::of(prop_oneof![Just(AgentOrigin::Fresh), id!(CallId).prop_map(AgentOrigin::ForkOf)]);
    let from = (option::of(id!(AgentId)), option::of(id!(CallId)), origin);
    (id!(AgentId), any::<u32>(), from, option::of(id!(Name)), option::of(id!(Name)))
        .prop_map(|(agent_id, resumption, (parent_agent_id, spawning_call_id, origin), profile, model)| AgentStart {
            agent_id,
            resumption,
            parent_agent_id,
            spawning_call_id,
            origin,
            profile,
            model,
        })
        .boxed()
}

fn agent_status() -> BoxedStrategy<AgentStatus> {
    select(&[
        AgentStatus::Settled,
        AgentStatus::Failed,
        AgentStatus::Interrupted,
        AgentStatus::BudgetExhausted,
        AgentStatus::Closed,
    ])
    .boxed()
}

pub(super) fn agent_end() -> BoxedStrategy<AgentEnd> {
    let kept = option::of(vec(id!(CallId), 0..4));
    (id!(AgentId), any::<u32>(), agent_status(), kept, vec(id!(AgentId), 0..4))
        .prop_map(|(agent_id, resumption, status, kept, answers_read)| AgentEnd {
            agent_id,
            resumption,
            status,
            kept,
            answers_read,
        })
        .boxed()
}

pub(super) fn seal() -> BoxedStrategy<Seal> {
    let kept = option::of(btree_map(id!(AgentId), vec(id!(CallId), 0..4), 0..4));
    (kept, any::<Option<u64>>()).prop_map(|(kept, expected_calls)| Seal { kept, expected_calls }).boxed()
}

pub(super) fn reward() -> BoxedStrategy<Reward> {
    (number(), btree_map(id!(Name), number(), 0..4))
        .prop_map(|(value, components)| Reward { value, components })
        .boxed()
}

pub(super) fn credit_values() -> BoxedStrategy<CreditValues> {
    (any::<Option<bool>>(), option::of(number()), option::of(number()))
        .prop_map(|(train, reward, advantage_scale)| CreditValues { train, reward, advantage_scale })
        .boxed()
}

pub(super) fn credit() -> BoxedStrategy<Credit> {
    let target = prop_oneof![id!(CallId).prop_map(CreditTarget::Call), id!(AgentId).prop_map(CreditTarget::Agent)];
    (target, credit_values()).prop_map(|(target, values)| Credit { target, values }).boxed()
}

fn rollout_record() -> BoxedStrategy<RolloutRecord> {
    let dispositions = select(&[Disposition::Unsaid, Disposition::Final, Disposition::WillRetry]);
    let by = select(&[DiscardedBy::Harness, DiscardedBy::Operator, DiscardedBy::Rule]);
    let decisions = select(&[
        Decision::IdleTimeout,
        Decision::MissingCallsDiscard,
        Decision::MissingCallsFinalise,
        Decision::MissingParentsGivenUp,
    ]);
    prop_oneof![
        open().prop_map(RolloutRecord::Open),
        id!(GroupId).prop_map(RolloutRecord::Group),
        call().prop_map(RolloutRecord::Call),
        (id!(CallId), id!(AgentId), option::of(call())).prop_map(|(call, parent_agent_id, prompt)| {
            RolloutRecord::ParentAgent { call, parent_agent_id, prompt }
        }),
        agent_start().prop_map(RolloutRecord::AgentStart),
        agent_end().prop_map(RolloutRecord::AgentEnd),
        (option::of(seal()), option::of(reward()), vec(credit(), 0..3))
            .prop_map(|(seal, reward, credits)| RolloutRecord::Finish(seal, reward, credits)),
        credit().prop_map(RolloutRecord::Credit),
        (text(), dispositions, by).prop_map(|(reason, disposition, by)| RolloutRecord::Discard {
            reason,
            disposition,
            by
        }),
        id!(CallId).prop_map(RolloutRecord::Conflict),
        decisions.prop_map(RolloutRecord::Decision),
    ]
    .boxed()
}

pub(super) fn rollout_settings() -> BoxedStrategy<RolloutSettings> {
    let rules = (
        select(&[SharedCallOwner::RootAgent, SharedCallOwner::FirstLeaf]),
        select(&[BrokenLinkRule::Infer, BrokenLinkRule::Discard]),
        select(&[AgentsWithoutListRule::Drop, AgentsWithoutListRule::Keep]),
        select(&[MissingCallRule::Discard, MissingCallRule::Finalise]),
        select(&[NonfiniteLogprobsRule::Refuse, NonfiniteLogprobsRule::Context]),
    );
    let times = any::<(u64, u64, u64)>();
    let of_credit = (
        vec(id!(Name), 0..3),
        select(&[UnreadAnswersRule::Train, UnreadAnswersRule::Context]),
        select(&[RowWeight::One, RowWeight::RolloutRows, RowWeight::RolloutTokens]),
    );
    (vec(id!(Name), 0..3), id!(Name), rules, any::<bool>(), any::<Option<u32>>(), times, of_credit)
        .prop_map(|(trained_policies, default_policy, rules, require_logprobs, vocabulary_limit, times, of_credit)| {
            RolloutSettings {
                trained_policies,
                default_policy,
                shared_call_owner: rules.0,
                broken_link: rules.1,
                agents_without_list: rules.2,
                missing_call: rules.3,
                require_logprobs,
                nonfinite_logprobs: rules.4,
                vocabulary_limit,
                idle_timeout_ms: times.0,
                missing_call_timeout_ms: times.1,
                missing_parent_timeout_ms: times.2,
                untrained_kinds: of_credit.0,
                unread_answers: of_credit.1,
                row_weight: of_credit.2,
            }
        })
        .boxed()
}

pub(super) fn consumer_group_settings() -> BoxedStrategy<ConsumerGroupSettings> {
    let unit = select(&[Unit::Row, Unit::Rollout, Unit::Group]);
    let start = select(&[StartPosition::Earliest, StartPosition::Latest]);
    let step = any::<(u32, u32, u64)>();
    let step = option::of(step.prop_map(|(units, shards, microbatch_tokens)| StepSettings {
        units,
        shards,
        microbatch_tokens,
    }));
    (option::of(id!(Name)), (unit, step), any::<(Option<u32>, Option<u64>)>(), start)
        .prop_map(|(policy, (unit, step), (max_row_tokens, max_staleness_versions), start)| ConsumerGroupSettings {
            policy,
            unit,
            step,
            max_row_tokens,
            max_staleness_versions,
            start,
        })
        .boxed()
}

pub(super) fn run_settings() -> BoxedStrategy<RunSettings> {
    let groups = vec((id!(ConsumerGroupId), consumer_group_settings()), 0..3);
    let required = vec(id!(ConsumerGroupId), 0..3);
    let retained = any::<(u64, u64, Option<u64>, u64, Option<u32>)>();
    let numbers = any::<(u32, u64, u64)>();
    (rollout_settings(), numbers, groups, required, retained, group_rules())
        .prop_map(|(rollout, numbers, consumer_groups, required_consumer_groups, retained, rules)| RunSettings {
            rollout: Arc::new(rollout),
            max_deliveries: numbers.0,
            lease_ms: numbers.1,
            tombstone_retention_ms: numbers.2,
            consumer_groups,
            required_consumer_groups,
            retention_ms: retained.0,
            unclaimed_retention_ms: retained.1,
            unclaimed_retention_bytes: retained.2,
            consumer_group_idle_expiry_ms: retained.3,
            max_lead_groups: retained.4,
            estimator: rules.estimator,
            drop_zero_variance: rules.drop_zero_variance,
            group_quorum: rules.quorum,
            group_timeout_ms: rules.timeout_ms,
        })
        .boxed()
}

pub(super) fn definition() -> BoxedStrategy<GroupDefinition> {
    let unit = select(&[UnitKind::Row, UnitKind::Rollout, UnitKind::Group]);
    let step = any::<(u32, u32, u64)>();
    let step = option::of(step.prop_map(|(units, shards, microbatch_tokens)| StepDefinition {
        units,
        shards,
        microbatch_tokens,
    }));
    (option::of(text()), (unit, step), any::<(Option<u32>, bool, u32, Option<u64>)>())
        .prop_map(|(policy, (unit, step), rest)| GroupDefinition {
            policy,
            unit,
            step,
            max_row_tokens: rest.0,
            ephemeral: rest.1,
            max_deliveries: rest.2,
            max_staleness_versions: rest.3,
        })
        .boxed()
}

fn unit() -> BoxedStrategy<UnitId> {
    text().prop_map(UnitId::new).boxed()
}

fn of_runs() -> BoxedStrategy<Record> {
    prop_oneof![
        (id!(RunId), any::<u64>(), run_settings()).prop_map(|(run, settings_version, settings)| {
            Record::Run { run, settings_version, settings: Arc::new(settings) }
        }),
        id!(RunId).prop_map(|run| Record::RunDeleted { run }),
        of_groups(),
        opened(),
    ]
    .boxed()
}

fn opened() -> BoxedStrategy<Record> {
    let of_group = (option::of(id!(GroupId)), option::of(group_rules()));
    (id!(RunId), id!(RolloutId), any::<(u32, u64, Option<u32>)>(), of_group)
        .prop_map(|(run, rollout, (attempt, settings_version, group_size), (group, group_rules))| {
            Record::RolloutOpened { run, rollout, attempt, group, settings_version, group_size, group_rules }
        })
        .boxed()
}

fn of_consumer_groups() -> BoxedStrategy<Record> {
    let group = || (id!(RunId), id!(ConsumerGroupId));
    prop_oneof![
        (group(), definition(), any::<bool>()).prop_map(|((run, consumer_group), definition, from_earliest)| {
            Record::ConsumerGroup { run, consumer_group, definition, from_earliest }
        }),
        (group(), vec(unit(), 0..5))
            .prop_map(|((run, consumer_group), units)| { Record::Acknowledged { run, consumer_group, units } }),
        (group(), unit(), select(&DropReason::ALL)).prop_map(|((run, consumer_group), unit, reason)| {
            Record::UnitDropped { run, consumer_group, unit, reason }
        }),
        (group(), any::<u64>(), vec(unit(), 0..5), vec(any::<u32>(), 0..3)).prop_map(
            |((run, consumer_group), index, members, acknowledged_shards)| {
                let step = FrozenStep { index, version: CutVersion::First, members, acknowledged_shards };
                Record::StepFrozen { run, consumer_group, step: Box::new(step) }
            }
        ),
        (group(), unit()).prop_map(|((run, consumer_group), unit)| Record::UnitReleased { run, consumer_group, unit }),
        (id!(RunId), vec((id!(RolloutId), any::<u32>()), 0..4), retired_for())
            .prop_map(|(run, rollouts, reason)| Record::RolloutsRetired { run, rollouts, reason }),
        group().prop_map(|(run, consumer_group)| Record::ConsumerGroupExpired { run, consumer_group }),
        (group(), any::<u64>())
            .prop_map(|((run, consumer_group), to)| { Record::Sought { run, consumer_group, to: Position(to) } }),
    ]
    .boxed()
}

fn retired_for() -> impl Strategy<Value = RetiredFor> {
    select(&[RetiredFor::Retention, RetiredFor::Room, RetiredFor::Unclaimed])
}

fn call_totals() -> BoxedStrategy<CallTotals> {
    let policy = (id!(Name), any::<(u64, u64, u64)>())
        .prop_map(|(policy, (trained, context, too_long))| PolicyTotals { policy, trained, context, too_long });
    (any::<(u64, u64, u64)>(), vec(policy, 0..3))
        .prop_map(|((empty, not_kept, kept), policies)| CallTotals { empty, not_kept, kept, policies })
        .boxed()
}

fn sum() -> BoxedStrategy<SettledSum> {
    any::<(u64, u64, u64)>().prop_map(|(units, tokens, rows)| SettledSum { units, tokens, rows }).boxed()
}

fn of_totals() -> BoxedStrategy<Record> {
    let gone =
        (text(), any::<(u64, u64)>()).prop_map(|(reason, (rollouts, calls))| GoneTotals { reason, rollouts, calls });
    let dropped = vec((select(&DropReason::ALL), sum()), 0..3);
    let group = (id!(ConsumerGroupId), call_totals(), sum(), dropped, any::<(u64, u64, Option<(u64, u64)>)>())
        .prop_map(|(consumer_group, calls, acknowledged, dropped, (forgotten_through, changed_at, blurred))| {
            ConsumerGroupTotals { consumer_group, calls, acknowledged, dropped, forgotten_through, changed_at, blurred }
        });
    (id!(RunId), call_totals(), vec(gone, 0..3), any::<u64>(), vec(group, 0..3))
        .prop_map(|(run, calls, gone, retired_rollouts, consumer_groups)| Record::RunTotals {
            run,
            totals: RunTotals { calls, gone, retired_rollouts, consumer_groups },
        })
        .boxed()
}

fn ended() -> BoxedStrategy<EndedRollout> {
    let member = select(&[Member::Open, Member::Finalised, Member::Out, Member::WillRetry]);
    let group = (id!(GroupId), any::<Option<u32>>(), member).prop_map(|(group, size, member)| EndedMember {
        group,
        size,
        member,
    });
    (id!(RolloutId), any::<(u32, bool, bool)>(), text(), option::of(group))
        .prop_map(|(rollout, (attempt, retired, is_final), reason, group)| EndedRollout {
            rollout,
            attempt,
            retired,
            reason,
            is_final,
            group,
        })
        .boxed()
}

fn of_copies() -> BoxedStrategy<Record> {
    let histories = vec((unit(), vec(any::<u64>(), 0..4)), 0..3);
    let units = (id!(ConsumerGroupId), vec(unit(), 0..3), vec((unit(), select(&DropReason::ALL)), 0..3), histories)
        .prop_map(|(consumer_group, acknowledged, dropped, histories)| CopiedUnits {
            consumer_group,
            acknowledged,
            dropped,
            histories,
        });
    let numbers = any::<(u32, u64, u64, u32, Option<u64>)>();
    let begins = (id!(RunId), id!(RolloutId), option::of(id!(GroupId)), rollout_settings(), numbers, vec(units, 0..3));
    prop_oneof![
        begins.prop_map(|(run, rollout, group, settings, numbers, given_to)| {
            Record::RolloutCopyBegins(Box::new(CopyBegins {
                reference: RolloutRef { run, group, rollout, attempt: numbers.0 },
                settings_version: numbers.1,
                settings: Arc::new(settings),
                opened_unix_ms: numbers.2,
                records: numbers.3,
                given_to,
                finalised: numbers.4.map(Position),
            }))
        }),
        (id!(RunId), id!(RolloutId), any::<u32>(), rollout_record())
            .prop_map(|(run, rollout, attempt, record)| { Record::RolloutCopied { run, rollout, attempt, record } }),
    ]
    .boxed()
}

fn of_snapshots() -> BoxedStrategy<Record> {
    let group = (id!(ConsumerGroupId), definition(), any::<(u64, u64, u64)>()).prop_map(
        |(consumer_group, definition, (made_at, seek_count, next_step_index))| GroupSnapshot {
            consumer_group,
            definition,
            made_at: Position(made_at),
            seek_count,
            next_step_index,
        },
    );
    let groups = vec(group, 0..3);
    prop_oneof![
        any::<u32>().prop_map(|runs| Record::SnapshotBegins { runs }),
        (id!(RunId), any::<(u64, u64)>(), run_settings(), groups).prop_map(
            |(run, (settings_version, created_unix_ms), settings, consumer_groups)| Record::RunSnapshot {
                run,
                settings_version,
                settings: Arc::new(settings),
                created_unix_ms,
                consumer_groups,
            }
        ),
        (id!(RunId), vec(ended(), 0..4)).prop_map(|(run, rollouts)| Record::Tombstones { run, rollouts }),
    ]
    .boxed()
}

/// Any record.
pub(super) fn record() -> BoxedStrategy<Record> {
    prop_oneof![
        of_runs(),
        of_consumer_groups(),
        of_snapshots(),
        of_copies(),
        of_totals(),
        (id!(RunId), id!(RolloutId), any::<u32>(), rollout_record())
            .prop_map(|(run, rollout, attempt, record)| { Record::Rollout { run, rollout, attempt, record } }),
    ]
    .boxed()
}
