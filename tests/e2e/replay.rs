//! Replaying the log gives the state that the service had, and a service that was started on it goes on as before.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use hedgerow::forest::digest::Digest;
use hedgerow::log::memory::MemoryLog;
use hedgerow::log::{Dated, Log, Position, Record};
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};
use hedgerow::queue::DropReason;
use hedgerow::rollout::event::{Decision, RolloutRecord};
use hedgerow::store::clock::Clock;
use hedgerow::store::image::{Image, RolloutImage, UnitImage};
use hedgerow::store::sequencer::Sequencer;
use hedgerow::store::{Eviction, Store, StoreOptions};
use hedgerow::telemetry::Telemetry;

use crate::queue_credit::Dice;
use crate::queue_taker::{Taker, finish, row, unit_ids};
use crate::replay_drive::{Drive, length};
use crate::service::{TestService, about, call, ids, seal, subscription};

/// The state that a log's records give.
pub(crate) fn replayed(log: &Arc<MemoryLog>) -> Image {
    let before = length(log);
    let options = StoreOptions {
        clock: Clock::manual(),
        telemetry: Telemetry::new(),
        memory_budget_bytes: hedgerow::limits::MEMORY_BUDGET_BYTES,
        restart_grace_ms: 0,
        eviction: Eviction::default(),
    };
    let (store, _commands) = Store::new(options);
    let mut sequencer = Sequencer::new(store);
    assert_eq!(sequencer.replay(&(Arc::clone(log) as Arc<dyn Log>)).unwrap(), Position(before));
    assert_eq!(length(log), before, "a replay logs nothing");
    sequencer.image()
}

/// All records of a log.
fn all(log: &MemoryLog) -> Vec<Dated> {
    let mut all = Vec::new();
    let mut push = |_, dated| {
        all.push(dated);
        ControlFlow::Continue(())
    };
    log.read(log.first_position(), &mut push).unwrap();
    all
}

/// The first records of a log, as a log of their own.
fn cut(log: &MemoryLog, records: usize) -> Arc<MemoryLog> {
    let first = MemoryLog::keeping();
    for dated in all(log).into_iter().take(records) {
        first.append(first.frame(&dated.record, dated.unix_ms));
    }
    Arc::new(first)
}

fn first_difference<K: Ord + Debug, V: PartialEq + Debug>(
    one: &BTreeMap<K, V>,
    other: &BTreeMap<K, V>,
) -> Option<String> {
    let keys = one.keys().chain(other.keys());
    let mut differing = keys.filter(|key| one.get(key) != other.get(key));
    differing.next().map(|key| format!("{key:?}\n  was  {:?}\n  is   {:?}", one.get(key), other.get(key)))
}

pub(crate) fn same(was: &Image, is: &Image) -> Result<(), String> {
    let rollouts = first_difference(&was.rollouts, &is.rollouts);
    let difference = rollouts
        .or_else(|| first_difference(&was.groups, &is.groups))
        .or_else(|| first_difference(&was.units, &is.units))
        .or_else(|| first_difference(&was.steps, &is.steps));
    difference.map_or(Ok(()), Err)
}

/// How often a workload did what.
type Census = BTreeMap<&'static str, u64>;

fn kind(record: &Record) -> &'static str {
    match record {
        Record::Run { settings_version: 1, .. } => "run made",
        Record::Run { .. } => "run changed",
        Record::RunDeleted { .. } => "run deleted",
        Record::GroupSize { .. } => "group size",
        Record::GroupRules { .. } => "group rules",
        Record::GroupReleased { .. } => "group released",
        Record::RolloutOpened { attempt: 0, .. } => "rollout opened",
        Record::RolloutOpened { .. } => "newer attempt opened",
        Record::ConsumerGroup { .. } => "consumer group made",
        Record::Acknowledged { .. } => "units acknowledged",
        Record::UnitDropped { reason: DropReason::Undeliverable, .. } => "unit undeliverable",
        Record::UnitDropped { .. } => "unit dropped by hand",
        Record::UnitReleased { .. } => "unit released",
        Record::StepFrozen { .. } => "step frozen",
        Record::SnapshotBegins { .. } | Record::RunSnapshot { .. } | Record::RunTotals { .. } => "snapshot",
        Record::Tombstones { .. } => "tombstones",
        Record::RolloutsRetired { .. } => "rollouts retired",
        Record::ConsumerGroupExpired { .. } => "consumer group expired",
        Record::Sought { .. } => "sought",
        Record::RolloutCopyBegins(_) => "copy",
        Record::RolloutCopied { .. } => "copied",
        Record::Rollout { record, .. } => match record {
            RolloutRecord::Open(_) => "open",
            RolloutRecord::Group(_) => "group joined",
            RolloutRecord::Call(_) | RolloutRecord::ParentAgent { .. } => "call",
            RolloutRecord::AgentStart(_) => "agent start",
            RolloutRecord::AgentEnd(_) => "agent end",
            RolloutRecord::Finish(Some(_), Some(_), _) => "finish",
            RolloutRecord::Finish(Some(_), None, _) => "seal",
            RolloutRecord::Finish(None, ..) => "reward",
            RolloutRecord::Credit(_) => "credit",
            RolloutRecord::Discard { .. } => "discard",
            RolloutRecord::Conflict(_) => "conflict",
            RolloutRecord::Decision(Decision::IdleTimeout) => "idle timeout",
            RolloutRecord::Decision(Decision::MissingCallsDiscard) => "missing calls: discard",
            RolloutRecord::Decision(Decision::MissingCallsFinalise) => "missing calls: finalise",
            RolloutRecord::Decision(Decision::MissingParentsGivenUp) => "missing parents given up",
        },
    }
}

/// All that [`kind`] knows, and what becomes of rollouts and units.
const EVERYTHING: [&str; 30] = [
    "group size",
    "run made",
    "run changed",
    "run deleted",
    "rollout opened",
    "newer attempt opened",
    "consumer group made",
    "units acknowledged",
    "unit undeliverable",
    "unit dropped by hand",
    "unit released",
    "open",
    "group joined",
    "call",
    "agent start",
    "agent end",
    "finish",
    "seal",
    "reward",
    "discard",
    "conflict",
    "idle timeout",
    "missing calls: discard",
    "missing calls: finalise",
    "missing parents given up",
    "rollout open at the end",
    "rollout finalised at the end",
    "rollout retired at the end",
    "unit due at the end",
    "unit acknowledged at the end",
];

fn count(census: &mut Census, log: &MemoryLog, image: &Image) {
    let records = all(log);
    let rollouts = image.rollouts.values().map(|rollout| match rollout {
        RolloutImage::Open(_) => "rollout open at the end",
        RolloutImage::Finalised(_) => "rollout finalised at the end",
        RolloutImage::Ended(how) if how.contains("Retired") => "rollout retired at the end",
        RolloutImage::Ended(_) => "rollout discarded at the end",
    });
    let units = image.units.values().map(|(unit, _)| match unit {
        UnitImage::Due => "unit due at the end",
        UnitImage::Acknowledged => "unit acknowledged at the end",
        UnitImage::Dropped(_) => "unit dropped at the end",
    });
    if log.first_position() > Position(1) {
        *census.entry("log without its beginning").or_default() += 1;
    }
    for what in records.iter().map(|dated| kind(&dated.record)).chain(rollouts).chain(units) {
        *census.entry(what).or_default() += 1;
    }
}

/// Two lives of a service that is driven at random on one log, and replays after each.
async fn drive_and_replay(seed: u64, log: Arc<MemoryLog>, census: &mut Census) -> Result<(), String> {
    let mut dice = Dice::new(seed);
    for life in 0..2 {
        let mut drive = Drive::start(log.clone(), dice).await;
        if life == 0 {
            drive.prepare().await;
        }
        drive.steps(100).await;
        let (image, rest) = drive.stop().await;
        dice = rest;
        let again = replayed(&log);
        same(&image, &again).map_err(|difference| format!("life {life}: {difference}"))?;
        same(&again, &replayed(&log)).map_err(|difference| format!("a second replay: {difference}"))?;
        // Wherever a crash cuts the log, what is left is a state. A log is let go of only when it can be read without that.
        let records = dice.below(length(&log) + 1);
        if log.first_position() == Position(1) {
            replayed(&cut(&log, usize::try_from(records).unwrap()));
        }
        if life == 1 {
            count(census, &log, &image);
        }
    }
    Ok(())
}

fn seeds(seeds: impl Iterator<Item = u64>, log: impl Fn() -> MemoryLog) -> Census {
    let mut census = Census::new();
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        if let Err(difference) = runtime.block_on(drive_and_replay(seed, Arc::new(log()), &mut census)) {
            panic!("seed {seed}: {difference}");
        }
    }
    println!("{census:?}");
    census
}

fn check_richness(census: &Census) {
    let never: Vec<_> = EVERYTHING.iter().filter(|what| !census.contains_key(*what)).collect();
    assert!(never.is_empty(), "the workload has become poorer: never {never:?}; {census:?}");
}

#[test]
fn a_replay_gives_what_the_service_had() {
    check_richness(&seeds((0..250).step_by(2), MemoryLog::keeping));
}

#[test]
fn a_replay_gives_what_the_service_had_with_records_that_are_durable_late() {
    // Where records are durable late, what follows from them comes late too.
    check_richness(&seeds((1..250).step_by(2), MemoryLog::held));
}

/// A log that is let go of as soon as it can be gives the same as a whole one.
#[test]
fn a_replay_gives_what_the_service_had_though_the_log_has_lost_its_beginning() {
    for (first, log) in [(0, MemoryLog::keeping as fn() -> MemoryLog), (1, MemoryLog::held)] {
        let census = seeds((first..250).step_by(2), || log().with_segments_of(7));
        let often = |what| census.get(what).is_some_and(|count| *count > 50);
        assert!(
            often("snapshot")
                && often("tombstones")
                && often("copy")
                && often("copied")
                && often("log without its beginning"),
            "{census:?}"
        );
    }
}

#[tokio::test]
async fn a_service_on_a_replayed_log_goes_on_where_the_other_stopped() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(log.clone()).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    let mut made = Vec::new();
    for (rollout, tokens) in [("a", 5), ("b", 300), ("c", 70), ("d", 9)] {
        made.push(row(&mut worker, "run", rollout, tokens).await);
    }
    let before = taker.take_units(4).await;
    assert_eq!(taker.ack(&made[1..2]).await, [AckOutcome::Acknowledged]);
    let open = about("run", "open");
    let prompt: Vec<u32> = (0..130).collect();
    worker.report(&open, Event::Call(call("one", "main", 1, &prompt, &[7; 70]))).await;
    worker.report(&open, Event::Seal(seal(&[("main", &["one", "two"])]))).await;
    drop((worker, taker));
    service.running.stop().await;

    let service = TestService::start_on(log).await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    assert!(!taker.trainer.subscribed.created);
    let after = taker.take_units(3).await;
    assert_eq!(unit_ids(&after), [made[0].as_str(), &made[2], &made[3]], "the same ids in the same order");
    for unit in &after {
        let same = before.iter().find(|before| before.unit_id == unit.unit_id).unwrap();
        assert_eq!((&unit.rows, unit.tokens), (&same.rows, same.tokens), "the same bytes");
        assert_eq!(unit.delivery_count, 1, "how often a unit was given out is not kept");
    }
    assert_eq!(taker.ack(&made[1..2]).await, [AckOutcome::AlreadyAcknowledged]);
    let answer = worker.report(&about("run", "b"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
    let answer = worker.report(&about("run", "a"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Duplicate);
    let again = Event::Call(call("one", "main", 1, &prompt, &[7; 70]));
    assert_eq!(worker.report(&open, again).await.outcome(), AnswerOutcome::Duplicate);

    let whole = [prompt, vec![7; 70]].concat();
    let base = v1::Base {
        call_id: "one".to_owned(),
        length_tokens: 200,
        digest: bytes::Bytes::copy_from_slice(&Digest::of(&whole).0),
    };
    let delta = v1::prompt::Prompt::Delta(v1::Delta { base: Some(base), suffix_token_ids: ids(&[1]) });
    let two = v1::Call { prompt: Some(v1::Prompt { prompt: Some(delta) }), ..call("two", "main", 2, &[], &[9]) };
    assert_eq!(worker.report(&open, Event::Call(two)).await.outcome(), AnswerOutcome::Accepted);
    worker.report(&open, Event::Reward(crate::service::reward(0.5))).await;
    let unit = taker.unit().await;
    assert_eq!(unit.unit_id, "run/open/0/main/two");
    assert_eq!(unit.rows[0].token_ids, [whole, vec![1, 9]].concat());
}

#[tokio::test]
async fn deadlines_start_afresh_after_a_restart() {
    let log = Arc::new(MemoryLog::keeping());
    let service = TestService::start_on(log.clone()).await;
    let mut worker = service.worker().await;
    let reference = about("run", "x");
    worker.report(&reference, Event::Call(call("one", "main", 1, &[1], &[2]))).await;
    worker.report(&reference, Event::Seal(seal(&[("main", &["one", "two"])]))).await;
    worker.report(&reference, Event::Reward(crate::service::reward(0.5))).await;
    service.clock.advance(Duration::from_secs(599));
    drop(worker);
    service.running.stop().await;
    let service = TestService::start_on(log).await;
    let mut worker = service.worker().await;
    service.clock.advance(Duration::from_secs(599));
    let answer = worker.report(&reference, Event::Heartbeat(v1::Heartbeat {})).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "time while it was down expires nothing");
    service.clock.advance(Duration::from_secs(1));
    let mut taker = Taker::join(&service, subscription("run", "trainers")).await;
    while taker.heartbeat(&service).await.incomplete_rollouts > 0 {}
    let answer = worker.report(&reference, Event::Heartbeat(v1::Heartbeat {})).await;
    assert_eq!(answer.ended.unwrap().reason, "missing_call");
}
