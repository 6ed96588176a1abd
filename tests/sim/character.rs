//! What a seed decides of its world before anything happens: how large, how fast, and what goes wrong when.

use std::sync::Arc;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::group::Estimator;
use hedgerow::ids::{ConsumerGroupId, Name};
use hedgerow::limits;
use hedgerow::log::segments::faulty::Fault;
use hedgerow::log::segments::{Drive, Durability, Options};
use hedgerow::rollout::run_settings::{ConsumerGroupSettings, RunSettings, StartPosition, Unit};
use hedgerow::rollout::settings::{AgentsWithoutListRule, BrokenLinkRule, MissingCallRule, RolloutSettings};
use hedgerow::store::Eviction;

use crate::case::{AgentsWithoutList, OnBrokenLink, Settings, SharedCallOwner};

pub(crate) const MINUTE_MS: u64 = 60_000;
/// How long a lease lasts without a sign of life.
pub(crate) const LEASE_MS: u64 = 5 * MINUTE_MS;
/// How long kept calls, and named parents, may be missing.
pub(crate) const MISSING_MS: u64 = 10 * MINUTE_MS;
/// How long nothing may be heard of an open rollout.
pub(crate) const IDLE_MS: u64 = 60 * MINUTE_MS;

/// The world of one seed.
#[derive(Clone, Debug)]
pub(crate) struct Character {
    pub(crate) log: Options,
    pub(crate) memory_budget_bytes: u64,
    /// When tokens leave memory: never, at once, or when it has become short.
    pub(crate) eviction: Eviction,
    pub(crate) rollouts: usize,
    pub(crate) workers: usize,
    pub(crate) streams: usize,
    /// Answers that may be outstanding on a stream.
    pub(crate) window: usize,
    /// How far apart requests may be that overtake each other.
    pub(crate) reorder: usize,
    pub(crate) consumer_groups: Vec<ConsumerGroup>,
    /// How often service, workers, trainers and disk go on, in relation to each other.
    pub(crate) paces: Paces,
    /// What ends each life of the service but the last.
    pub(crate) endings: Vec<Ending>,
    /// Each is one in so many steps; 0: never.
    pub(crate) worker_dies: usize,
    pub(crate) trainer_dies: usize,
    pub(crate) time_jumps: usize,
    pub(crate) disk_fills: usize,
    /// Somebody watches rows go by.
    pub(crate) tail: bool,
    /// The operator keeps checkpoints, and seeks them.
    pub(crate) seeks: bool,
    pub(crate) restart_grace_ms: u64,
    /// Rewards are whole numbers, so that some groups have equal ones.
    pub(crate) coarse_rewards: bool,
    pub(crate) settings: Arc<RunSettings>,
    /// The same settings, in the words of the model.
    pub(crate) model: Settings,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Paces {
    pub(crate) service: usize,
    pub(crate) workers: usize,
    pub(crate) trainers: usize,
    pub(crate) disk: usize,
}

/// What ends a life of the service, after so many steps at most.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ending {
    pub(crate) steps: usize,
    pub(crate) by: By,
    /// The next opening of the log is struck too.
    pub(crate) opening_fails: Option<OpeningFault>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// The process is killed; what it has written is there.
    Kill,
    /// The machine stops; of what is not synced, anything may be there.
    MachineStops,
    /// It is asked to stop.
    Stop,
    /// One of its next operations on the disk fails; then the process ends, or the machine stops.
    Disk { fault: Fault, in_operations: u64, machine_stops: bool },
}

/// What strikes while the log is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpeningFault {
    Read { in_reads: u64 },
    Operation { fault: Fault, in_operations: u64 },
}

#[derive(Clone, Debug)]
pub(crate) struct ConsumerGroup {
    pub(crate) name: ConsumerGroupId,
    pub(crate) settings: ConsumerGroupSettings,
    /// It is there from the start, and gets everything.
    pub(crate) declared: bool,
    pub(crate) members: usize,
    pub(crate) credit_tokens: u64,
    /// Whether its members have names of their own.
    pub(crate) named: bool,
}

impl Character {
    pub(crate) fn new(chance: &mut SplitMix64) -> Self {
        let consumer_groups = consumer_groups(chance);
        let (mut settings, model) = settings(chance, &consumer_groups);
        let durability = if chance.below(5) == 0 { Durability::Os } else { Durability::Fsync };
        let mut pace = || [1, 1, 2, 4, 16][chance.below(5)];
        let paces = Paces { service: pace(), workers: pace(), trainers: pace(), disk: pace() };
        let endings = (0..1 + chance.below(5)).map(|_| ending(chance, durability)).collect();
        let log = log(chance, durability);
        if log.budget_bytes < limits::LOG_BUDGET_BYTES {
            // What is undeliverable holds the log until somebody releases it, who comes only when all else rests.
            settings.max_deliveries = 1000;
        }
        Self {
            log,
            memory_budget_bytes: match chance.below(8) {
                0 => 96 << 10,
                _ => limits::MEMORY_BUDGET_BYTES,
            },
            eviction: eviction(chance),
            rollouts: 1 + chance.below(7),
            workers: 1 + chance.below(3),
            streams: 1 + chance.below(3),
            window: 1 + chance.below(12),
            reorder: [1, 1, 3, 12][chance.below(4)],
            consumer_groups,
            paces,
            endings,
            worker_dies: [0, 150, 600][chance.below(3)],
            trainer_dies: [0, 60, 300][chance.below(3)],
            time_jumps: [0, 100, 500][chance.below(3)],
            disk_fills: [0, 0, 0, 150][chance.below(4)],
            tail: chance.below(3) == 0,
            seeks: chance.below(3) == 0,
            restart_grace_ms: [0, 0, 3000, 60_000][chance.below(4)],
            coarse_rewards: false,
            settings: Arc::new(settings),
            model,
        }
    }

    /// The same world, in which groups may be released. It has a chance of its own, so that other things stay as they are.
    pub(crate) fn with_groups(mut self, chance: &mut SplitMix64) -> Self {
        if chance.below(2) == 0 {
            return self;
        }
        let mut settings = RunSettings::clone(&self.settings);
        settings.estimator = [Estimator::None, Estimator::Mean, Estimator::Grpo, Estimator::Rloo][chance.below(4)];
        for group in &mut self.consumer_groups {
            // Whoever wants groups of a run without an estimator is declared.
            let may_be = settings.estimator != Estimator::None || group.declared;
            if may_be && chance.below(3) == 0 {
                group.settings.unit = Unit::Group;
            }
        }
        let declared = self.consumer_groups.iter().filter(|group| group.declared);
        settings.consumer_groups = declared.map(|group| (group.name.clone(), group.settings.clone())).collect();
        if settings.group_rules().are_released() {
            settings.group_timeout_ms = [MINUTE_MS, 20 * MINUTE_MS, IDLE_MS + MINUTE_MS][chance.below(3)];
            settings.group_quorum = (chance.below(3) == 0).then(|| 2 + chance.below(2) as u32);
            settings.drop_zero_variance = settings.estimator != Estimator::None && chance.below(3) == 0;
            self.coarse_rewards = chance.below(2) == 0;
        }
        self.settings = Arc::new(settings);
        self
    }
}

fn eviction(chance: &mut SplitMix64) -> Eviction {
    let above_percent = [limits::MEMORY_EVICT_PERCENT, 0, 0, 2][chance.below(4)];
    Eviction {
        idle_above_percent: above_percent.min(limits::MEMORY_EVICT_IDLE_PERCENT),
        above_percent,
        token_bytes_min: 0,
    }
}

fn log(chance: &mut SplitMix64, durability: Durability) -> Options {
    let segment_bytes = [8 << 10, 16 << 10, 16 << 10, 48 << 10][chance.below(4)];
    let usual = Options::new(chance.next_u64());
    Options {
        segment_bytes,
        // Some fill up, and what lives in them is written forward.
        budget_bytes: match chance.below(6) {
            0 => (10 + chance.below(20) as u64) * segment_bytes,
            _ => usual.budget_bytes,
        },
        batch_bytes: [600, 4 << 10, limits::LOG_BATCH_BYTES][chance.below(3)],
        durability,
        drive: Drive::ByHand,
        ..usual
    }
}

fn ending(chance: &mut SplitMix64, durability: Durability) -> Ending {
    let machine_may_stop = durability == Durability::Fsync;
    let steps = [60, 300, 800, 2000][chance.below(4)];
    let fault = |chance: &mut SplitMix64| match chance.below(3) {
        0 if machine_may_stop => Fault::Crash,
        1 => Fault::Full,
        _ => Fault::Error,
    };
    let by = match chance.below(8) {
        0 | 1 => By::Kill,
        2 | 3 if machine_may_stop => By::MachineStops,
        2 | 3 => By::Kill,
        4 => By::Stop,
        _ => {
            let fault = fault(chance);
            let machine_stops = machine_may_stop && (fault == Fault::Crash || chance.below(2) == 0);
            let soon = [4, 30, 120][chance.below(3)];
            By::Disk { fault, in_operations: chance.below(soon) as u64, machine_stops }
        }
    };
    let opening_fails = match chance.below(6) {
        0 => Some(OpeningFault::Read { in_reads: chance.below(12) as u64 }),
        1 => Some(OpeningFault::Operation { fault: fault(chance), in_operations: chance.below(16) as u64 }),
        _ => None,
    };
    Ending { steps: 1 + chance.below(steps), by, opening_fails }
}

fn consumer_groups(chance: &mut SplitMix64) -> Vec<ConsumerGroup> {
    let count = 1 + chance.below(3);
    let group = |place: usize| {
        let unit = if chance.below(2) == 0 { Unit::Row } else { Unit::Rollout };
        let policy = (chance.below(4) == 0).then(|| name(["main", "small"][chance.below(2)]));
        let max_row_tokens = (chance.below(4) == 0).then(|| [6, 20, 70][chance.below(3)]);
        ConsumerGroup {
            name: ConsumerGroupId::parse(&format!("group-{place}")).expect("an id"),
            settings: ConsumerGroupSettings {
                step: None,
                policy,
                unit,
                max_row_tokens,
                max_staleness_versions: None,
                start: StartPosition::Earliest,
            },
            // The first may be made by who subscribes to it; then everything waits for it.
            declared: place == 0 || chance.below(3) > 0,
            members: 1 + chance.below(2),
            credit_tokens: [30, 400, 100_000][chance.below(3)],
            named: chance.below(4) > 0,
        }
    };
    (0..count).map(group).collect()
}

fn settings(chance: &mut SplitMix64, groups: &[ConsumerGroup]) -> (RunSettings, Settings) {
    let mut model = Settings::default();
    let mut rollout = RolloutSettings::with_default_policy(name("main"));
    (rollout.idle_timeout_ms, rollout.missing_call_timeout_ms) = (IDLE_MS, MISSING_MS);
    rollout.missing_parent_timeout_ms = MISSING_MS;
    if chance.below(3) == 0 {
        model.shared_call_owner = SharedCallOwner::FirstLeaf;
        rollout.shared_call_owner = hedgerow::forest::plan::SharedCallOwner::FirstLeaf;
    }
    if chance.below(3) == 0 {
        model.agents_without_list = AgentsWithoutList::Keep;
        rollout.agents_without_list = AgentsWithoutListRule::Keep;
    }
    if chance.below(6) == 0 {
        model.on_broken_link = OnBrokenLink::Discard;
        rollout.broken_link = BrokenLinkRule::Discard;
    }
    if chance.below(2) == 0 {
        rollout.missing_call = MissingCallRule::Finalise;
    }
    let declared = groups.iter().filter(|group| group.declared);
    let settings = RunSettings {
        rollout: Arc::new(rollout),
        max_deliveries: [2, 5, 1000][chance.below(3)],
        lease_ms: LEASE_MS,
        retention_ms: [0, 0, MINUTE_MS, IDLE_MS][chance.below(4)],
        consumer_groups: declared.map(|group| (group.name.clone(), group.settings.clone())).collect(),
        ..RunSettings::with_defaults()
    };
    (settings, model)
}

fn name(text: &str) -> Name {
    Name::parse(text).expect("a name")
}
