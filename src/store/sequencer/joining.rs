//! Subscriptions: what they ask for is judged, their consumer group is made if it is not there, and they join it.

use std::sync::Arc;

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, RunId};
use crate::log::{Position, Record};
use crate::queue::{ConsumerFacts, ConsumerId, GroupDefinition, GroupRefused, GroupVerdict, JoinRefused};
use crate::rollout::run_settings::{ConsumerGroupSettings, RunSettings, StartPosition, Unit};

use super::super::effect::Sequenced;
use super::consumers::{Consumer, Subscribed, Subscription, ToConsumer, definition, in_words, unit_not_found};
use super::news::Owed;
use super::runs::run_not_found;
use super::{Sequencer, SubscribeReply};

impl Sequencer {
    /// Joins a consumer to its group, which is made first if it is not there.
    pub(super) fn subscribe(&mut self, subscription: Box<Subscription>, reply: SubscribeReply) {
        let is_expiring = self.runs.get(&subscription.run).is_some_and(|run| {
            let name = &subscription.consumer_group;
            run.making.contains(name) && run.queue.group(name.as_str()).is_some()
        });
        if is_expiring {
            return self.waiting_subscriptions.push((subscription, reply));
        }
        match self.judge_subscription(&subscription) {
            Err(refusal) => drop(reply.send(Err(refusal))),
            Ok(Some(definition)) if !subscription.ephemeral => {
                let (run, consumer_group) = (subscription.run.clone(), subscription.consumer_group.clone());
                let from_earliest = self.settings_wanted(&subscription).start == StartPosition::Earliest;
                self.waiting_subscriptions.push((subscription, reply));
                let making = self.runs.get_mut(&run).is_some_and(|state| state.making.insert(consumer_group.clone()));
                if making {
                    let record = Record::ConsumerGroup {
                        run: run.clone(),
                        consumer_group: consumer_group.clone(),
                        definition: definition.clone(),
                        from_earliest,
                    };
                    self.log(
                        &record,
                        Some(Sequenced::ConsumerGroup { run, consumer_group, definition, from_earliest }),
                    );
                }
            }
            Ok(Some(definition)) => {
                let from_earliest = self.settings_wanted(&subscription).start == StartPosition::Earliest;
                // No record: an ephemeral group lives and goes with its consumer.
                let (run, name) = (&subscription.run, &subscription.consumer_group);
                // It is in no record, and cannot be sought.
                self.make_consumer_group(run, name, definition, from_earliest, Position::default());
                let joined = self.join(*subscription, true);
                drop(reply.send(joined));
            }
            Ok(None) => drop(reply.send(self.join(*subscription, false))),
        }
    }

    /// What a subscription wants of a group that is not there: what it says, else what the run's settings declare.
    fn settings_wanted(&self, subscription: &Subscription) -> ConsumerGroupSettings {
        let declared = || {
            let settings = self.runs.get(&subscription.run)?.settings_now();
            let of_group = |(name, _): &&(ConsumerGroupId, _)| *name == subscription.consumer_group;
            settings.consumer_groups.iter().find(of_group).map(|(_, settings)| settings.clone())
        };
        subscription.settings.clone().or_else(declared).unwrap_or_default()
    }

    /// The group's consumers that waited for it to be made.
    pub(super) fn resume_subscriptions(&mut self, run: &RunId, consumer_group: &ConsumerGroupId, first_made_it: bool) {
        let ready = self.no_longer_waiting(|waiting| waiting.run == *run && waiting.consumer_group == *consumer_group);
        let created = std::iter::once(first_made_it).chain(std::iter::repeat(false));
        for (created, (subscription, reply)) in created.zip(ready) {
            // A later one may ask for something else than what the first one made.
            let joined = self.judge_subscription(&subscription).and_then(|_| self.join(*subscription, created));
            drop(reply.send(joined));
        }
    }

    /// Takes subscriptions that wait out of the line.
    pub(super) fn no_longer_waiting(
        &mut self,
        which: impl Fn(&Subscription) -> bool,
    ) -> Vec<(Box<Subscription>, SubscribeReply)> {
        let waiting = std::mem::take(&mut self.waiting_subscriptions);
        let (ready, rest) = waiting.into_iter().partition(|(subscription, _)| which(subscription));
        self.waiting_subscriptions = rest;
        ready
    }

    /// Those that waited for a consumer group to expire subscribe to what there is then.
    pub(super) fn subscribe_again(&mut self, run: &RunId, consumer_group: &ConsumerGroupId) {
        let ready = self.no_longer_waiting(|waiting| waiting.run == *run && waiting.consumer_group == *consumer_group);
        ready.into_iter().for_each(|(subscription, reply)| self.subscribe(subscription, reply));
    }

    /// The definition of the group to be made, or none if it is there.
    fn judge_subscription(&mut self, subscription: &Subscription) -> Result<Option<GroupDefinition>, Refusal> {
        let settings = self.settings_wanted(subscription);
        // What is refused makes no run.
        let run_settings = self.runs.get(&subscription.run).map(|run| Arc::clone(run.settings_now()));
        let run_settings = run_settings.unwrap_or_else(|| Arc::new(RunSettings::with_defaults()));
        if let Some(policy) = settings.policy.as_ref().filter(|policy| !run_settings.rollout.trains(policy)) {
            let message = format!("run {:?} does not train policy {policy:?}", subscription.run);
            return Err(Refusal::new(Reason::InvalidValue, message).field("subscription.settings.policy"));
        }
        if settings.unit == Unit::Group && !run_settings.group_rules().are_released() {
            let message = format!(
                "run {:?} releases no groups; set its estimator, or declare a consumer group of unit group in its settings",
                subscription.run
            );
            return Err(Refusal::new(Reason::InvalidValue, message).field("subscription.settings.unit"));
        }
        if subscription.ephemeral && settings.step.is_some() {
            let message = "the unit is step, but an ephemeral subscription takes whatever is finalised";
            return Err(Refusal::new(Reason::InvalidValue, message).field("subscription.settings.unit"));
        }
        let run = self.run_or_new(&subscription.run)?;
        let requested = definition(&settings, run.settings_now().max_deliveries, subscription.ephemeral);
        let known = run.queue.group(subscription.consumer_group.as_str()).map(|group| group.definition().clone());
        let asked = match (&known, &subscription.settings) {
            (Some(known), None) => known.clone(),
            // How often units are given out is the run's to say, not the subscriber's.
            (Some(known), Some(_)) => GroupDefinition { max_deliveries: known.max_deliveries, ..requested },
            (None, _) => requested,
        };
        judge_shard(subscription, &known, &asked)?;
        match run.queue.judge_group(subscription.consumer_group.as_str(), &asked) {
            Ok(GroupVerdict::Exists) => Ok(None),
            Ok(GroupVerdict::New) => Ok(Some(asked)),
            Err(GroupRefused::Mismatch(mismatch)) => {
                let message = format!(
                    "consumer group {:?} takes {}, not {}; leave the settings out, or use another consumer_group",
                    mismatch.name,
                    in_words(&mismatch.declared),
                    in_words(&mismatch.requested)
                );
                Err(Refusal::new(Reason::ConsumerGroupConflict, message).field("subscription.settings"))
            }
            Err(GroupRefused::TooManyGroups { max_consumer_groups }) => {
                let message = format!("the run has {max_consumer_groups} consumer groups, as many as it may");
                Err(Refusal::new(Reason::ServiceFull, message)
                    .field("subscription.consumer_group")
                    .retry_after_ms(60_000))
            }
        }
    }

    fn join(&mut self, subscription: Subscription, created: bool) -> Result<Subscribed, Refusal> {
        let now_ms = self.store.clock.now_ms();
        self.cut_what_is_held(&subscription);
        let refetched = self.judge_refetch(&subscription)?;
        let run = self.runs.get_mut(&subscription.run).ok_or_else(|| run_not_found(&subscription.run))?;
        let settings = Arc::clone(run.settings_now());
        let required = settings.requires(&subscription.consumer_group);
        let name = subscription.consumer_group.as_str();
        let group = run.queue.group_mut(name).ok_or_else(|| unit_not_found(&subscription.consumer_group, None))?;
        let (definition, seek_count) = (group.definition().clone(), group.seek_count());
        let (id, tokens) = (subscription.consumer, subscription.credit_tokens);
        let name = subscription.consumer_name;
        let is_older = |facts: &ConsumerFacts| facts.name == name && !name.is_empty();
        let older: Vec<_> = group.consumers().filter(is_older).map(|facts| facts.consumer).collect();
        let joined = group.join_for(id, (&name, subscription.shard), tokens, &subscription.held, now_ms);
        let joined = joined.map_err(|refused| match refused {
            JoinRefused::TooManyConsumers { max_consumers } => {
                let message = format!("the consumer group has {max_consumers} members, as many as it may");
                Refusal::new(Reason::ServiceFull, message).field("subscription.consumer").retry_after_ms(60_000)
            }
            JoinRefused::AlreadyJoined => Refusal::new(Reason::Internal, "a stream joined twice"),
        })?;
        let consumer = Consumer {
            run: subscription.run.clone(),
            consumer_group: subscription.consumer_group,
            ephemeral: definition.ephemeral,
            owed: match created && !definition.ephemeral {
                true => Owed::to_the_first(std::mem::take(&mut run.unclaimed_ended)),
                false => Owed::default(),
            },
            sender: subscription.sender,
        };
        if let Some(version) = subscription.policy_version {
            group.trainer_is_on(id, None, version);
        }
        run.retention.is_not_idle(&consumer.consumer_group);
        self.consumers.insert(id, consumer);
        self.stirred.insert(subscription.run.clone());
        if let Some(at) = refetched {
            self.refetch(id, at, now_ms);
        }
        older.into_iter().for_each(|older| self.replace(older));
        let lasts = !required && !definition.ephemeral;
        let idle_expiry_ms = lasts.then_some(settings.consumer_group_idle_expiry_ms);
        Ok(Subscribed { definition, created, joined, lease_ms: settings.lease_ms, seek_count, idle_expiry_ms })
    }

    /// Ends the older stream of a consumer that has opened another; what it does not hold any more waits again.
    fn replace(&mut self, older: ConsumerId) {
        let message = "another stream was opened under this consumer's name; give each consumer a name of its own";
        let refusal = Refusal::new(Reason::ConsumerInUse, message).field("subscription.consumer");
        if let Some(consumer) = self.consumers.get(&older) {
            // A full line ends with its channel all the same.
            let _ = consumer.sender.try_send(ToConsumer::Ended(refusal));
        }
        self.leave(older);
    }
}

/// Whether a subscription says which shard it takes exactly where units go out in steps. Of a group that is there with other
/// settings, the settings are what is wrong.
fn judge_shard(
    subscription: &Subscription,
    known: &Option<GroupDefinition>,
    asked: &GroupDefinition,
) -> Result<(), Refusal> {
    if known.as_ref().is_some_and(|known| known != asked) {
        return Ok(());
    }
    let invalid = |field, message: String| Err(Refusal::new(Reason::InvalidValue, message).field(field));
    let field = "subscription.shard";
    match (asked.step, subscription.shard) {
        (None, Some(_)) => {
            invalid(field, "a shard is given, but the consumer group does not take steps; leave it out".to_owned())
        }
        (None, None) if subscription.step_index.is_some() => {
            let message = "a step is given, but the consumer group does not take steps; leave it out";
            invalid("subscription.step_index", message.to_owned())
        }
        (None, None) => Ok(()),
        (Some(step), None) => {
            let message = format!(
                "shard is missing: steps of this consumer group have {} shards; say which one, from 0",
                step.shards
            );
            Err(Refusal::new(Reason::MissingField, message).field(field))
        }
        (Some(step), Some(shard)) if shard >= step.shards => invalid(
            field,
            format!("shard is {shard}, but steps of this consumer group have {} shards, from 0", step.shards),
        ),
        (Some(_), Some(_)) => Ok(()),
    }
}
