//! `InspectService`: people and tools look. In this release one rollout at a time.

use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use crate::error::{Reason, Refusal};
use crate::ids::RolloutRef;
use crate::proto::v1;
use crate::store::RolloutKey;

use super::{Shared, convert, ended_message, not_in_this_release, status};

/// The service.
pub(super) struct Inspect {
    shared: Shared,
}

impl Inspect {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl v1::inspect_service_server::InspectService for Inspect {
    type WatchStream = ReceiverStream<Result<v1::WatchResponse, Status>>;
    type ExportTraceStream = ReceiverStream<Result<v1::ExportTraceResponse, Status>>;

    async fn get_rollout(
        &self,
        request: Request<v1::GetRolloutRequest>,
    ) -> Result<Response<v1::GetRolloutResponse>, Status> {
        let request = request.into_inner();
        let refused = |refusal: Refusal| status::status(&refusal, None);
        let (run, rollout, shown) = convert::inspect::get_rollout(&request).map_err(refused)?;
        let key = RolloutKey { run, rollout };
        let found = self.shared.store.show(&key, |view| convert::inspect::rollout(view, &shown));
        // What is shown, and also that there is nothing, may rest on what is not durable yet.
        self.shared.store.durable(self.shared.store.last_position()).await;
        match found {
            Some(Ok(response)) => Ok(Response::new(response)),
            Some(Err(ended)) => {
                let about = RolloutRef { run: key.run, group: None, rollout: key.rollout, attempt: ended.attempt };
                Ok(Response::new(convert::inspect::ended_rollout(&about, ended_message(&ended))))
            }
            None => {
                let message = format!("run {:?} has no rollout {:?}, or it ended too long ago", key.run, key.rollout);
                Err(refused(Refusal::new(Reason::RolloutNotFound, message).field("rollout_id")))
            }
        }
    }

    async fn list_runs(&self, _: Request<v1::ListRunsRequest>) -> Result<Response<v1::ListRunsResponse>, Status> {
        Err(not_in_this_release("a list of runs"))
    }

    async fn list_rollouts(
        &self,
        _: Request<v1::ListRolloutsRequest>,
    ) -> Result<Response<v1::ListRolloutsResponse>, Status> {
        Err(not_in_this_release("a list of rollouts"))
    }

    async fn list_groups(&self, _: Request<v1::ListGroupsRequest>) -> Result<Response<v1::ListGroupsResponse>, Status> {
        Err(not_in_this_release("a list of groups"))
    }

    async fn list_consumers(
        &self,
        _: Request<v1::ListConsumersRequest>,
    ) -> Result<Response<v1::ListConsumersResponse>, Status> {
        Err(not_in_this_release("a list of consumers"))
    }

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(not_in_this_release("watching for changes"))
    }

    async fn export_trace(
        &self,
        _: Request<v1::ExportTraceRequest>,
    ) -> Result<Response<Self::ExportTraceStream>, Status> {
        Err(not_in_this_release("the export of traces"))
    }
}
