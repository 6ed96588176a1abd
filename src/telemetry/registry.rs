//! The recorder, and handles to series in it: made once for each set of label values, then free of look-ups.
//!
//! A gauge that several owners share (all runs after the first few are `other`) is the sum, or the greatest, of what each
//! owner says; what an owner said goes with its handle.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, SharedString};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use parking_lot::Mutex;

use super::labels::Labels;
use super::names::{self, Kind, Metric};

static METADATA: Metadata<'static> = Metadata::new("hedgerow", Level::INFO, None);

/// The recorder with the labels that it has seen.
pub(super) struct Registry {
    pub(super) recorder: Arc<PrometheusRecorder>,
    pub(super) handle: PrometheusHandle,
    pub(super) labels: Labels,
    greatest: Mutex<HashMap<Key, Arc<Greatest>>>,
}

impl Registry {
    /// An empty one, with the buckets of each histogram and the help of each metric.
    pub(super) fn new() -> Self {
        let builder = names::ALL.iter().fold(PrometheusBuilder::new(), |builder, metric| match metric.kind {
            Kind::Histogram(bounds) => {
                match builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), bounds) {
                    Ok(builder) => builder,
                    Err(error) => unreachable!("the bounds of {} are a constant list: {error}", metric.name),
                }
            }
            Kind::Counter | Kind::Gauge => builder,
        });
        let recorder = Arc::new(builder.build_recorder());
        names::describe(&recorder);
        Self { handle: recorder.handle(), recorder, labels: Labels::default(), greatest: Mutex::default() }
    }

    pub(super) fn counter(&self, metric: &Metric, values: &[SharedString]) -> Counter {
        debug_assert_eq!(metric.kind, Kind::Counter, "{}", metric.name);
        self.recorder.register_counter(&key(metric, values), &METADATA)
    }

    pub(super) fn gauge(&self, metric: &Metric, values: &[SharedString]) -> Gauge {
        debug_assert_eq!(metric.kind, Kind::Gauge, "{}", metric.name);
        self.recorder.register_gauge(&key(metric, values), &METADATA)
    }

    pub(super) fn histogram(&self, metric: &Metric, values: &[SharedString]) -> Histogram {
        debug_assert!(matches!(metric.kind, Kind::Histogram(_)), "{}", metric.name);
        self.recorder.register_histogram(&key(metric, values), &METADATA)
    }

    /// One owner's share of a gauge that is a sum.
    pub(super) fn share(&self, metric: &Metric, values: &[SharedString]) -> Share {
        Share { gauge: self.gauge(metric, values), said: Mutex::new(0) }
    }

    /// One owner's candidate for a gauge that is the greatest of all.
    pub(super) fn candidate(&self, metric: &Metric, values: &[SharedString]) -> Candidate {
        let gauge = self.gauge(metric, values);
        let new = || Arc::new(Greatest { gauge, candidates: Mutex::default(), next: AtomicU64::new(0) });
        let whole = Arc::clone(self.greatest.lock().entry(key(metric, values)).or_insert_with(new));
        Candidate { number: whole.next.fetch_add(1, Ordering::Relaxed), whole }
    }
}

fn key(metric: &Metric, values: &[SharedString]) -> Key {
    debug_assert_eq!(metric.labels.len(), values.len(), "the labels of {}", metric.name);
    let labels = metric.labels.iter().zip(values).map(|(label, value)| Label::new(*label, value.clone()));
    Key::from_parts(metric.name, labels.collect::<Vec<_>>())
}

/// A count as the number that metrics take. Exact up to 2^53.
pub(super) fn number(count: u64) -> f64 {
    count as f64
}

/// One owner's share of a sum. Taken back when it is dropped.
pub(super) struct Share {
    gauge: Gauge,
    said: Mutex<u64>,
}

impl Share {
    pub(super) fn set(&self, count: u64) {
        let mut said = self.said.lock();
        if *said != count {
            self.gauge.increment(number(count) - number(*said));
            *said = count;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.set(0);
    }
}

struct Greatest {
    gauge: Gauge,
    candidates: Mutex<Candidates>,
    next: AtomicU64,
}

#[derive(Default)]
struct Candidates {
    /// Without those that are zero: most are, and there may be many.
    values: BTreeMap<u64, f64>,
    greatest: f64,
}

impl Greatest {
    /// One candidate has this value now. All are looked at only if it was the greatest and is no longer.
    fn change(&self, candidate: u64, value: f64) {
        let mut candidates = self.candidates.lock();
        let Candidates { values, greatest } = &mut *candidates;
        let before = if value > 0.0 { values.insert(candidate, value) } else { values.remove(&candidate) };
        if value >= *greatest {
            *greatest = value;
        } else if before.is_some_and(|before| before >= *greatest) {
            *greatest = values.values().copied().fold(0.0, f64::max);
        } else {
            return;
        }
        self.gauge.set(*greatest);
    }
}

/// One owner's candidate for the greatest. Taken back when it is dropped.
pub(super) struct Candidate {
    number: u64,
    whole: Arc<Greatest>,
}

impl Candidate {
    pub(super) fn set(&self, value: f64) {
        self.whole.change(self.number, value);
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        self.whole.change(self.number, 0.0);
    }
}

/// Something counted in a gauge for as long as this is held.
#[must_use = "what is dropped at once is not counted"]
#[derive(Debug)]
pub struct Held {
    gauge: Gauge,
    amount: f64,
}

impl Held {
    pub(super) fn new(gauge: &Gauge, amount: u64) -> Self {
        let held = Self { gauge: gauge.clone(), amount: number(amount) };
        held.gauge.increment(held.amount);
        held
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.gauge.decrement(self.amount);
    }
}
