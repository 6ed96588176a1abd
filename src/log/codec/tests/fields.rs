//! No field is forgotten: a record with one field changed has other bytes.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::encode;
use super::{groups, strategies};
use crate::forest::CallRecord;
use crate::forest::call::{CallFacts, Delta, RecordedPrompt};
use crate::group::{Decided, GroupRules};
use crate::ids::{ConsumerGroupId, RolloutId, RunId};
use crate::log::Record;
use crate::queue::GroupDefinition;
use crate::rollout::event::{AgentEnd, AgentStart, Open, Reward, RolloutRecord, Seal};
use crate::rollout::run_settings::{ConsumerGroupSettings, RunSettings};
use crate::rollout::settings::RolloutSettings;

/// Puts each field of one value into the other, one at a time, and checks that its bytes are others where the field is. A
/// field that is not listed does not compile.
macro_rules! each_field {
    ($type:ident { $($field:ident),+ $(,)? }, $one:expr, $other:expr, $record:expr) => {{
        let (one, other): ($type, $type) = ($one, $other);
        let $type { $($field: _),+ } = &one;
        let bytes = encode(&$record(one.clone()));
        $(
            let mut changed = one.clone();
            changed.$field = other.$field.clone();
            let same = format!("{:?}", changed.$field) == format!("{:?}", one.$field);
            // All numbers that are none look the same, so that only what looks different must be different.
            prop_assert!(same || encode(&$record(changed)) != bytes, "{} is forgotten", stringify!($field));
        )+
    }};
}

fn rollout(record: RolloutRecord) -> Record {
    Record::Rollout {
        run: RunId::parse("run").unwrap(),
        rollout: RolloutId::parse("rollout").unwrap(),
        attempt: 1,
        record,
    }
}

fn run(settings: RunSettings) -> Record {
    Record::Run { run: RunId::parse("run").unwrap(), settings_version: 1, settings: Arc::new(settings) }
}

fn no_ids() -> RecordedPrompt {
    RecordedPrompt::Known { base: None, suffix: Vec::new() }
}

fn of_delta(delta: Delta) -> Record {
    let call = crate::ids::CallId::parse("call").unwrap();
    rollout(RolloutRecord::Call(CallRecord::Prompt(call, RecordedPrompt::Waiting(delta))))
}

fn of_consumer_group(settings: ConsumerGroupSettings) -> Record {
    let name = ConsumerGroupId::parse("trainer").unwrap();
    run(RunSettings { consumer_groups: vec![(name, settings)], ..RunSettings::with_defaults() })
}

fn of_definition(definition: GroupDefinition) -> Record {
    let consumer_group = ConsumerGroupId::parse("trainer").unwrap();
    Record::ConsumerGroup { run: RunId::parse("run").unwrap(), consumer_group, definition, from_earliest: true }
}

fn pair<T: std::fmt::Debug + 'static>(strategy: fn() -> BoxedStrategy<T>) -> BoxedStrategy<(T, T)> {
    (strategy(), strategy()).boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn of_calls(facts in pair(strategies::call_facts), delta in pair(strategies::delta)) {
        each_field!(
            CallFacts {
                call_id, agent_id, parent_agent_id, sequence, link, kind, policy, versions, model, generation, logprobs,
                train, finish_reason, times_unix_ms,
            },
            facts.0,
            facts.1,
            |facts| rollout(RolloutRecord::Call(CallRecord::New(Box::new((facts, no_ids())))))
        );
        each_field!(Delta { base, base_length, digest, suffix }, delta.0, delta.1, of_delta);
    }

    #[test]
    fn of_a_rollouts_facts(
        open in pair(strategies::open),
        start in pair(strategies::agent_start),
        end in pair(strategies::agent_end),
        seal in pair(strategies::seal),
        reward in pair(strategies::reward),
    ) {
        each_field!(Open { group_size, tags }, open.0, open.1, |open| rollout(RolloutRecord::Open(open)));
        each_field!(
            AgentStart { agent_id, resumption, parent_agent_id, spawning_call_id, origin, profile, model },
            start.0,
            start.1,
            |start| rollout(RolloutRecord::AgentStart(start))
        );
        each_field!(
            AgentEnd { agent_id, resumption, status, kept, answers_read },
            end.0,
            end.1,
            |end| rollout(RolloutRecord::AgentEnd(end))
        );
        each_field!(
            Seal { kept, expected_calls }, seal.0, seal.1, |seal| rollout(RolloutRecord::Finish(Some(seal), None, Vec::new()))
        );
        each_field!(
            Reward { value, components },
            reward.0,
            reward.1,
            |reward| rollout(RolloutRecord::Finish(None, Some(reward), Vec::new()))
        );
    }

    #[test]
    fn of_settings(
        settings in pair(strategies::run_settings),
        of_rollouts in pair(strategies::rollout_settings),
        of_group in pair(strategies::consumer_group_settings),
        definition in pair(strategies::definition),
        rules in pair(groups::group_rules),
        decided in pair(groups::decided),
    ) {
        each_field!(
            RunSettings {
                rollout, max_deliveries, lease_ms, tombstone_retention_ms, consumer_groups, required_consumer_groups,
                retention_ms, unclaimed_retention_ms, unclaimed_retention_bytes, consumer_group_idle_expiry_ms,
                max_lead_groups, estimator, drop_zero_variance, group_quorum, group_timeout_ms,
            },
            settings.0,
            settings.1,
            run
        );
        each_field!(
            RolloutSettings {
                trained_policies, default_policy, shared_call_owner, broken_link, agents_without_list, missing_call,
                require_logprobs, nonfinite_logprobs, vocabulary_limit, idle_timeout_ms, missing_call_timeout_ms,
                missing_parent_timeout_ms, untrained_kinds, unread_answers, row_weight,
            },
            of_rollouts.0,
            of_rollouts.1,
            |rollout| run(RunSettings { rollout: Arc::new(rollout), ..RunSettings::with_defaults() })
        );
        each_field!(
            GroupRules { estimator, drop_zero_variance, quorum, timeout_ms, has_group_units },
            rules.0,
            rules.1,
            |rules| groups::record_of(Decided { rules, ..decided.0.clone() })
        );
        each_field!(
            Decided { rules, released_for, size, counted, absences, absent }, decided.0, decided.1, groups::record_of
        );
        each_field!(
            ConsumerGroupSettings { policy, unit, step, max_row_tokens, max_staleness_versions, start }, of_group.0, of_group.1, of_consumer_group
        );
        each_field!(
            GroupDefinition { policy, unit, step, max_row_tokens, max_staleness_versions, ephemeral, max_deliveries },
            definition.0,
            definition.1,
            of_definition
        );
    }
}
