//! What goes out: units to consumers that have credit, and news to those concerned.

use crate::ids::{ConsumerGroupId, RunId};
use crate::limits::{DISPATCH_STALE_AT_ONCE, DISPATCH_UNITS_AT_ONCE, EPHEMERAL_NEWS_ROOM};
use crate::queue::ConsumerId;

use super::Sequencer;
use super::consumers::{ToConsumer, UnitDelivery};
use super::release::whole_unit;

impl Sequencer {
    /// Gives out what can go out in the runs where something has changed. Consumers that are let go stir theirs again.
    pub(super) fn dispatch(&mut self) {
        let now_ms = self.store.clock.now_ms();
        for run_id in std::mem::take(&mut self.stirred) {
            self.release_groups(&run_id);
            let Some(run) = self.runs.get_mut(&run_id) else { continue };
            run.shared.watchers.run_changes();
            let (mut lost, mut stale, mut in_steps) = (Vec::new(), Vec::new(), Vec::new());
            for (name, group) in run.queue.groups_mut() {
                let decisions = group.judge_stale(now_ms, DISPATCH_STALE_AT_ONCE);
                let may_be_more = decisions.len() == DISPATCH_STALE_AT_ONCE;
                if let Some(name) = ConsumerGroupId::parse(name).ok().filter(|_| !decisions.is_empty()) {
                    stale.push((name, decisions));
                }
                if may_be_more {
                    self.stirred.insert(run_id.clone());
                    continue;
                }
                if group.takes_steps() {
                    in_steps.extend(ConsumerGroupId::parse(name));
                    continue;
                }
                loop {
                    let room = group.definition().ephemeral.then(|| {
                        let members = group.consumer_ids().filter_map(|id| self.consumers.get(&id));
                        members
                            .map(|member| member.sender.capacity().saturating_sub(EPHEMERAL_NEWS_ROOM))
                            .min()
                            .unwrap_or(0)
                    });
                    let most = room.unwrap_or(DISPATCH_UNITS_AT_ONCE).min(DISPATCH_UNITS_AT_ONCE);
                    let (kind, seek_count) = (group.definition().unit, group.seek_count());
                    let deliveries = if most == 0 { Vec::new() } else { group.dispatch(now_ms, most) };
                    let count = deliveries.len();
                    for delivery in deliveries {
                        let (groups, retained) = (&mut run.groups, &run.retained);
                        let rows = whole_unit(groups, retained, group.definition(), delivery.payload);
                        let unit = Box::new(UnitDelivery {
                            unit: delivery.unit,
                            kind,
                            rows,
                            shard: None,
                            tokens: delivery.tokens,
                            delivery_number: delivery.delivery_number,
                            seek_count,
                        });
                        let consumer = self.consumers.get(&delivery.consumer);
                        if consumer.is_none_or(|to| to.sender.try_send(ToConsumer::Unit(unit)).is_err()) {
                            lost.push(delivery.consumer);
                        }
                    }
                    if count < most || count == 0 {
                        break;
                    }
                }
            }
            for consumer_group in in_steps {
                lost.extend(self.dispatch_steps(&run_id, &consumer_group, now_ms));
            }
            let Some(run) = self.runs.get_mut(&run_id) else { continue };
            let next_ms = run.next_deadline_ms().filter(|_| !self.seeking.contains(&run_id));
            self.deadlines.put(&run_id, next_ms);
            for (consumer_group, decisions) in stale {
                self.decide(&run_id, &consumer_group, decisions);
            }
            for consumer in lost {
                self.leave(consumer);
            }
        }
    }

    /// Tells a consumer something. One whose line is full does not read: its subscription ends, and its units go to others.
    pub(super) fn tell(&mut self, id: ConsumerId, news: ToConsumer) {
        if self.consumers.get(&id).is_some_and(|consumer| consumer.sender.try_send(news).is_err()) {
            tracing::warn!(consumer = id.0, "a consumer that does not read is let go");
            self.leave(id);
        }
    }

    pub(super) fn tell_members(
        &mut self,
        run: &RunId,
        consumer_group: &ConsumerGroupId,
        news: impl Fn(ConsumerId) -> ToConsumer,
    ) {
        self.members(run, consumer_group.as_str()).into_iter().for_each(|id| self.tell(id, news(id)));
    }

    /// The streams of the members of a consumer group.
    pub(super) fn members(&self, run: &RunId, consumer_group: &str) -> Vec<ConsumerId> {
        let group = self.runs.get(run).and_then(|run| run.queue.group(consumer_group));
        group.map(|group| group.consumer_ids().collect()).unwrap_or_default()
    }
}
