//! A scrape after one recording of everything; the bound on labels; gauges with several owners.

#![expect(clippy::expect_used, reason = "a test ends where its ground is not as it says")]

use std::collections::BTreeMap;

use super::*;
use crate::ids::{ConsumerGroupId, Name};
use crate::limits::METRIC_LABEL_VALUES_MAX;

fn run(number: usize) -> RunId {
    RunId::parse(&format!("run-{number}")).expect("an identifier")
}

fn policy() -> Name {
    Name::parse("actor").expect("an identifier")
}

/// The samples of a text as Prometheus reads it: name with labels, and value.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let mut types: BTreeMap<&str, &str> = BTreeMap::new();
    let mut samples = BTreeMap::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a type");
            assert!(types.insert(name, kind).is_none(), "{name} has two types");
        } else if !line.starts_with("# HELP ") {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').map_or((series, None), |(name, rest)| (name, Some(rest)));
            let stem = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
            let histogram = stem.is_some_and(|stem| types.get(stem) == Some(&"histogram"));
            assert!(histogram || types.contains_key(name), "{line} has no type");
            assert!(labels.is_none_or(|labels| labels.ends_with("\"}")), "{line}");
            let value = value.parse().unwrap_or_else(|_| panic!("{line} has no number"));
            assert!(samples.insert(series.to_owned(), value).is_none(), "{line} is there twice");
        }
    }
    samples
}

fn value(telemetry: &Telemetry, series: &str) -> f64 {
    let samples = parse(&telemetry.render());
    *samples.get(series).unwrap_or_else(|| panic!("{series} is not in {:#?}", samples.keys()))
}

#[test]
fn a_scrape_has_every_declared_metric_after_one_recording() {
    let telemetry = Telemetry::new();
    let metrics = telemetry.run(&run(1));
    metrics.call_accepted(&policy());
    metrics.rollout_opened();
    metrics.rollout_ended(RolloutEnd::Discarded(EndReason::IdleTimeout));
    metrics.policy(&policy()).row_made(RowMade { trained_calls: 3, trained_tokens: 40, context_tokens: 60 });
    metrics.rollout_shape(RolloutShape { roots: 1, leaves: 2, depth: 3, agents: 2, agents_without_list: 1 });
    metrics.reward_to_row(Duration::from_millis(3));
    metrics.group_released("whole", None);
    metrics.group_released("timeout", Some("too_few_members"));
    telemetry.durable_answer(Duration::from_micros(700));
    telemetry.log_sync(Duration::from_micros(300));
    telemetry.refused(Reason::CallConflict);
    let _ledger = metrics.call_ledger(&policy());
    let _group = metrics.consumer_group(&ConsumerGroupId::parse("trainer").expect("an identifier"));
    telemetry.upkeep();

    let text = telemetry.render();
    parse(&text);
    for metric in names::ALL {
        let kind = match metric.kind {
            names::Kind::Counter => "counter",
            names::Kind::Gauge => "gauge",
            names::Kind::Histogram(_) => "histogram",
        };
        assert!(text.contains(&format!("# TYPE {} {kind}\n", metric.name)), "{} is not there\n{text}", metric.name);
        assert!(text.contains(&format!("# HELP {} ", metric.name)), "{} has no help", metric.name);
    }
    assert_eq!(value(&telemetry, "hedgerow_requests_refused_total{reason=\"call_conflict\"}"), 1.0);
    assert_eq!(value(&telemetry, "hedgerow_durable_answer_seconds_bucket{le=\"0.001\"}"), 1.0);
    assert_eq!(value(&telemetry, "hedgerow_durable_answer_seconds_bucket{le=\"0.0005\"}"), 0.0);
    assert_eq!(value(&telemetry, "hedgerow_open_rollouts{run=\"run-1\"}"), 0.0);
}

#[test]
fn every_word_has_its_own_counter() {
    let telemetry = Telemetry::new();
    let metrics = telemetry.run(&run(1));
    LinkLabel::ALL.iter().for_each(|kind| metrics.link(*kind));
    DriftLabel::ALL.iter().for_each(|kind| metrics.drift(*kind));
    Reason::ALL.iter().for_each(|reason| telemetry.refused(*reason));
    let samples = parse(&telemetry.render());
    let ones = |name: &str| samples.iter().filter(|(series, value)| series.starts_with(name) && **value == 1.0).count();
    assert_eq!(ones("hedgerow_links_total{"), LinkLabel::ALL.len());
    assert_eq!(ones("hedgerow_drifts_total{"), DriftLabel::ALL.len());
    assert_eq!(ones("hedgerow_requests_refused_total{"), Reason::ALL.len());
    for who in WaitingOn::ALL {
        telemetry.set_waiting_on(*who);
        let samples = parse(&telemetry.render());
        let sum: f64 =
            WaitingOn::ALL.iter().map(|who| samples[&format!("hedgerow_waiting_on{{who=\"{}\"}}", who.as_str())]).sum();
        assert_eq!((sum, samples[&format!("hedgerow_waiting_on{{who=\"{}\"}}", who.as_str())]), (1.0, 1.0));
    }
}

#[test]
fn runs_and_policies_after_the_first_few_are_other() {
    let telemetry = Telemetry::new();
    for number in 0..METRIC_LABEL_VALUES_MAX + 3 {
        telemetry.run(&run(number)).duplicate();
        let policy = Name::parse(&format!("policy-{number}")).expect("an identifier");
        telemetry.run(&run(0)).call_accepted(&policy);
    }
    assert_eq!(value(&telemetry, "hedgerow_duplicates_total{run=\"other\"}"), 3.0);
    assert_eq!(value(&telemetry, "hedgerow_calls_accepted_total{run=\"run-0\",policy=\"other\"}"), 3.0);
    let samples = parse(&telemetry.render());
    let series = |name: &str| samples.keys().filter(|series| series.starts_with(name)).count();
    assert_eq!(series("hedgerow_duplicates_total{"), METRIC_LABEL_VALUES_MAX + 1);
    assert_eq!(series("hedgerow_calls_accepted_total{"), METRIC_LABEL_VALUES_MAX + 1);
}

#[test]
fn a_gauge_with_several_owners_is_their_sum_or_their_greatest() {
    let telemetry = Telemetry::new();
    let _named: Vec<_> = (0..METRIC_LABEL_VALUES_MAX).map(|number| telemetry.run(&run(number))).collect();
    let (one, two) = (telemetry.run(&run(100)), telemetry.run(&run(101)));
    let (ledger_one, ledger_two) = (one.call_ledger(&policy()), two.call_ledger(&policy()));
    ledger_one.set(&CallCounts { accepted: 9, pending: 4, gone: vec![(EndReason::Harness, 5)], ..Default::default() });
    ledger_two.set(&CallCounts { accepted: 1, pending: 1, ..Default::default() });
    ledger_two.set(&CallCounts { accepted: 2, pending: 2, ..Default::default() });
    let accepted = "hedgerow_ledger_accepted_calls{run=\"other\",policy=\"actor\"}";
    assert_eq!(value(&telemetry, accepted), 11.0);
    let gone = "hedgerow_ledger_calls{run=\"other\",policy=\"actor\",fate=\"gone\",reason=\"harness\"}";
    assert_eq!(value(&telemetry, gone), 5.0);
    drop(ledger_one);
    assert_eq!((value(&telemetry, accepted), value(&telemetry, gone)), (2.0, 0.0));

    one.set_oldest_open_rollout(Duration::from_secs(60));
    two.set_oldest_open_rollout(Duration::from_secs(20));
    let oldest = "hedgerow_oldest_open_rollout_seconds{run=\"other\"}";
    assert_eq!(value(&telemetry, oldest), 60.0);
    drop(one);
    telemetry.forget_run(&run(100));
    assert_eq!(value(&telemetry, oldest), 20.0);
}

#[test]
fn the_rows_of_a_consumer_group_stand_by_state() {
    let telemetry = Telemetry::new();
    let group = telemetry.run(&run(1)).consumer_group(&ConsumerGroupId::parse("trainer").expect("an identifier"));
    let dropped = vec![("stale", 2), ("a word on no list", 1)];
    let rows = RowCounts { made: 10, acknowledged: 4, waiting: 2, leased: 1, dropped };
    assert!(rows.adds_up());
    group.set(&ConsumerGroupFigures { queued_units: 2, lag: Duration::from_secs(7), rows, ..Default::default() });
    let samples = parse(&telemetry.render());
    let states = samples.iter().filter(|(series, _)| series.starts_with("hedgerow_ledger_rows{"));
    assert_eq!(states.map(|(_, rows)| rows).sum::<f64>(), 10.0);
    let labels = "{run=\"run-1\",consumer_group=\"trainer\"";
    assert_eq!(samples[&format!("hedgerow_ledger_rows{labels},state=\"dropped\",reason=\"other\"}}")], 1.0);
    assert_eq!(samples[&format!("hedgerow_consumer_lag_seconds{labels}}}")], 7.0);

    let consumers = format!("hedgerow_consumers{labels}}}");
    for connected in [3, 0] {
        group.set(&ConsumerGroupFigures { consumers: connected, ..Default::default() });
        assert_eq!(value(&telemetry, &consumers), connected as f64);
    }
}

#[test]
fn services_in_one_process_share_what_is_installed() {
    assert!(Arc::ptr_eq(&Telemetry::install(), &Telemetry::install()));
}
