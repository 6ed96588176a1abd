//! What a plan gives where nothing is killed: a service in this process, told everything over one stream, compared with the
//! slow model of the rules.

use std::collections::BTreeMap;
use std::time::Duration;

use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::{self, Ack};
use tokio::task::JoinHandle;

use crate::plan::{Plan, RUN, Rollout};
use crate::reference;
use crate::rows::Print;
use crate::service::{TestService, Unit, subscription};
use crate::trainer::{GROUPS, Group};
use crate::wire;
use crate::worker::fault;

/// How long it may take; only a failing test waits so long.
const SECONDS_MAX: u64 = 60;

/// The run's settings: what trainers that are killed leave behind is given out again however often.
pub(crate) fn run_settings() -> v1::RunSettings {
    let declared = |group: Group| v1::ConsumerGroupDeclaration {
        consumer_group: group.name.to_owned(),
        settings: Some(group.settings()),
    };
    v1::RunSettings {
        consumer_groups: GROUPS.into_iter().map(declared).collect(),
        max_deliveries: Some(1000),
        ..v1::RunSettings::default()
    }
}

/// The rows of a plan by their ids, the same for every consumer group.
pub(crate) async fn rows(plan: &Plan) -> Result<BTreeMap<String, Print>, String> {
    let run = tokio::time::timeout(Duration::from_secs(SECONDS_MAX), told(plan));
    run.await.map_err(|_| "the undisturbed run does not give the rows of the model".to_owned())?
}

async fn told(plan: &Plan) -> Result<BTreeMap<String, Print>, String> {
    let mut expected = BTreeMap::new();
    for rollout in plan.rollouts.iter().filter(|rollout| !rollout.discarded) {
        let answer = reference::answer(&rollout.case).map_err(|refusal| format!("the model refuses: {refusal:?}"))?;
        expected.insert(rollout.id.as_str(), (rollout, answer.rows));
    }
    let count: usize = expected.values().map(|(_, rows)| rows.len()).sum();
    let service = TestService::start().await;
    service.create_run(RUN, run_settings()).await;
    let by_row = take(&service, GROUPS[0], count).await;
    let by_rollout = take(&service, GROUPS[1], count).await;
    let mut worker = service.worker().await;
    for request in &plan.requests {
        let answer = worker.report(&request.about, request.event.clone()).await;
        if let Some(fault) = fault(request, &answer, false) {
            return Err(format!("undisturbed: {fault}"));
        }
    }
    let [by_row, by_rollout] = [by_row.await, by_rollout.await].map(|units| units.map_err(|error| error.to_string()));
    let by_rollout = by_rollout?;
    for unit in &by_rollout {
        compare(unit, &expected)?;
    }
    let [one, other] = [prints(&by_row?), prints(&by_rollout)];
    service.running.stop().await;
    if one != other || one.len() != count {
        return Err(format!("undisturbed: by row {}, by rollout {}, of {count}", one.len(), other.len()));
    }
    Ok(one)
}

/// Takes units until they have so many rows, and acknowledges them.
async fn take(service: &TestService, group: Group, rows: usize) -> JoinHandle<Vec<Unit>> {
    let mut trainer = service.trainer(subscription(RUN, group.name)).await;
    tokio::spawn(async move {
        let mut units: Vec<Unit> = Vec::new();
        while units.iter().map(|unit| unit.rows.len()).sum::<usize>() < rows {
            let unit = trainer.unit().await;
            let ack = Ack { unit_ids: vec![unit.unit_id.clone()], seek_count: 0 };
            trainer.send(Request::Ack(ack)).await;
            units.push(unit);
        }
        units
    })
}

fn prints(units: &[Unit]) -> BTreeMap<String, Print> {
    units.iter().flat_map(|unit| &unit.rows).map(|row| (row.row_id.clone(), Print::of(row))).collect()
}

/// A rollout's rows are those of the model.
fn compare(unit: &Unit, expected: &BTreeMap<&str, (&Rollout, Vec<crate::case::Row>)>) -> Result<(), String> {
    let id = unit.rows.first().map(|row| row.header.rollout_id.as_str()).unwrap_or_default();
    let (rollout, expected) = expected.get(id).ok_or_else(|| format!("rollout {id} should have no rows"))?;
    unit.rows.iter().try_for_each(|row| crate::credit::check(&rollout.case, row))?;
    // The model knows nothing of attempts.
    let attempt = format!("/{}/", rollout.attempt);
    let rows = unit
        .rows
        .iter()
        .map(|row| crate::service::Row { row_id: row.row_id.replacen(&attempt, "/0/", 1), ..row.clone() });
    let first = Unit { unit_id: unit.unit_id.clone(), rows: rows.collect(), ..Unit::default() };
    wire::same_rows(expected, &wire::rows(&first, rollout.reward)?).map_err(|fault| format!("{id}: {fault}"))
}
