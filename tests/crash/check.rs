//! What must be true when a batch is over, whatever was killed in it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use hedgerow::proto::v1::admin_service_client::AdminServiceClient;
use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::{self, AnswerOutcome};
use prost::Message as _;
use tonic::transport::Channel;

use crate::plan::{Plan, RUN, WORKERS};
use crate::rows::{Applied, Print};
use crate::service::Worker;
use crate::trainer::GROUPS;
use crate::undisturbed::run_settings;
use crate::worker::Journal;

/// How long what must come may take; only a failing test waits so long.
const SECONDS_MAX: u64 = 60;
/// It is looked this often at most whether it has come.
const LOOK_MS: u64 = 10;

pub(crate) async fn connect(address: &str) -> Result<Channel, String> {
    let endpoint = Channel::from_shared(address.to_owned()).map_err(|error| error.to_string())?;
    endpoint.connect().await.map_err(|error| error.to_string())
}

/// Makes the run, with its consumer groups.
pub(crate) async fn create_run(address: &str) -> Result<(), String> {
    let mut admin = AdminServiceClient::new(connect(address).await?);
    let request = v1::CreateRunRequest { run_id: RUN.to_owned(), settings: Some(run_settings()) };
    admin.create_run(request).await.map(|_| ()).map_err(|status| status.to_string())
}

/// Waits until every unit of every consumer group is acknowledged.
pub(crate) async fn no_unit_is_left(address: &str) -> Result<(), String> {
    let mut inspect = InspectServiceClient::new(connect(address).await?);
    let mut every = tokio::time::interval(Duration::from_millis(LOOK_MS));
    let mut left = String::new();
    let look = async {
        loop {
            every.tick().await;
            let request = v1::ListConsumersRequest { run_id: RUN.to_owned(), ..v1::ListConsumersRequest::default() };
            let listed = inspect.list_consumers(request).await.map_err(|status| status.to_string())?.into_inner();
            let groups = listed.consumer_groups;
            let is_done = |group: &v1::ConsumerGroupSummary| {
                (group.queued_units, group.leased_units, group.undeliverable_units) == (0, 0, 0)
            };
            if groups.len() == GROUPS.len() && groups.iter().all(is_done) {
                return Ok(());
            }
            left = format!("units are left: {groups:?}");
        }
    };
    let looked = tokio::time::timeout(Duration::from_secs(SECONDS_MAX), look).await;
    looked.unwrap_or(Err(left))
}

/// Tells everything of a batch that is over once more: all of it has ended.
pub(crate) async fn all_has_ended(address: &str, plan: &Plan) -> Result<(), String> {
    let mut worker = Worker::open(connect(address).await?).await;
    for request in &plan.requests {
        let answer = worker.report(&request.about, request.event.clone()).await;
        let superseded = answer.refusal.as_ref().is_some_and(|refusal| refusal.reason == "attempt_superseded");
        if answer.outcome() != AnswerOutcome::AlreadyEnded && !(superseded && request.superseded) {
            return Err(format!("after all, {:?} of {:?} is answered {answer:?}", request.event, request.about));
        }
    }
    Ok(())
}

/// Everything was answered, and nothing accepted twice.
pub(crate) fn journals(plan: &Plan, path: impl Fn(usize) -> std::path::PathBuf) -> Result<(), String> {
    let mut accepted = BTreeSet::new();
    let mut answered = 0;
    for worker in 0..WORKERS {
        let journal = Journal::open(&path(worker)).map_err(|error| error.to_string())?;
        answered += journal.answered.len();
        for place in journal.accepted {
            let request = &plan.requests[place];
            let content = v1::ReportRequest {
                request_seq: 0,
                rollout: Some(request.about.clone()),
                event: Some(request.event.clone()),
            };
            if !accepted.insert(content.encode_to_vec()) {
                return Err(format!("accepted twice: {:?} of {:?}", request.event, request.about));
            }
        }
    }
    let requests = plan.requests.len();
    if answered == requests { Ok(()) } else { Err(format!("{answered} of {requests} requests are answered")) }
}

/// What a consumer group has applied of a batch: each row once, each call trained once, the bytes those of an undisturbed run.
pub(crate) fn rows(
    path: &Path,
    batch: u64,
    expected: &BTreeMap<String, Print>,
) -> Result<BTreeMap<String, Print>, String> {
    let applied = Applied::open(path).map_err(|error| error.to_string())?;
    if let Some(repeated) = applied.repeats.first() {
        return Err(format!("applied twice: {repeated}"));
    }
    let of_batch = format!("{RUN}/b{batch}-");
    let rows: BTreeMap<String, Print> = applied
        .rows()
        .iter()
        .filter(|(id, _)| id.starts_with(&of_batch))
        .map(|(id, row)| (id.clone(), row.clone()))
        .collect();
    let mut trained = BTreeSet::new();
    for (row_id, row) in &rows {
        let Some(expected) = expected.get(row_id) else { return Err(format!("{row_id} is no row of this batch")) };
        if (row.without_time, &row.trains) != (expected.without_time, &expected.trains) {
            return Err(format!("{row_id} is {row:?}, and undisturbed {expected:?}"));
        }
        if let Some(twice) = row.trains.iter().find(|call| !trained.insert(call.as_str())) {
            return Err(format!("{twice} is trained twice, in {row_id} too"));
        }
    }
    match expected.keys().find(|row_id| !rows.contains_key(*row_id)) {
        Some(missing) => Err(format!("{missing} was not applied")),
        None => Ok(rows),
    }
}
