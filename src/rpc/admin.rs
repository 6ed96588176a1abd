//! `AdminService`: runs, and what is done by hand.

use std::sync::Arc;
use std::time::Duration;

use tonic::{Request, Response, Status};

use crate::error::{Reason, Refusal};
use crate::ids::{ConsumerGroupId, GroupId};
use crate::proto::v1;
use crate::queue::UnitId;
use crate::rollout::event::{DiscardedBy, Event};
use crate::store::report::Reply;
use crate::store::sequencer::{Command, Look, group_not_found};

use super::convert::fields::identifier;
use super::convert::inspect::lists;
use super::{Shared, convert, ended_message, refused, run_id, status};

/// How long a drain waits for streams to end.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(9);

/// The service.
pub(super) struct Admin {
    shared: Shared,
}

impl Admin {
    pub(super) fn new(shared: Shared) -> Self {
        Self { shared }
    }
}

#[tonic::async_trait]
impl v1::admin_service_server::AdminService for Admin {
    async fn create_run(
        &self,
        request: Request<v1::CreateRunRequest>,
    ) -> Result<Response<v1::CreateRunResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let settings = convert::settings::run_settings(request.settings).map_err(|refusal| refused(*refusal))?;
        let facts = self.shared.decide(|reply| Command::CreateRun(run.clone(), Arc::new(settings), reply)).await?;
        let run = convert::settings::run(&run, &facts.settings, facts.settings_version, facts.created_unix_ms);
        Ok(Response::new(v1::CreateRunResponse { run: Some(run) }))
    }

    async fn update_run_settings(
        &self,
        request: Request<v1::UpdateRunSettingsRequest>,
    ) -> Result<Response<v1::UpdateRunSettingsResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let settings = convert::settings::run_settings(request.settings).map_err(|refusal| refused(*refusal))?;
        let version = request.expected_settings_version;
        let facts =
            self.shared.decide(|reply| Command::UpdateRun(run.clone(), Arc::new(settings), version, reply)).await?;
        let run = convert::settings::run(&run, &facts.settings, facts.settings_version, facts.created_unix_ms);
        Ok(Response::new(v1::UpdateRunSettingsResponse { run: Some(run) }))
    }

    async fn get_run(&self, request: Request<v1::GetRunRequest>) -> Result<Response<v1::GetRunResponse>, Status> {
        let id = run_id(&request.into_inner().run_id)?;
        let found = self.shared.store.run(&id).map(|run| (run.settings.lock().clone(), run.created_unix_ms));
        self.shared.store.durable(self.shared.store.last_position()).await;
        let Some(((version, settings), created_unix_ms)) = found else {
            return Err(refused(Refusal::new(Reason::RunNotFound, format!("there is no run {id:?}")).field("run_id")));
        };
        let run = convert::settings::run(&id, &settings, version, created_unix_ms);
        Ok(Response::new(v1::GetRunResponse { run: Some(run) }))
    }

    async fn delete_run(
        &self,
        request: Request<v1::DeleteRunRequest>,
    ) -> Result<Response<v1::DeleteRunResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let deleted = self.shared.decide(|reply| Command::DeleteRun(run, request.force, reply)).await?;
        Ok(Response::new(v1::DeleteRunResponse {
            open_rollouts: deleted.open_rollouts,
            unacknowledged_rows: deleted.unacknowledged_rows,
        }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        if request.into_inner().retry_after.is_some() {
            let refusal = convert::fields::not_in_this_release("retry_after", "a delay of the operator's own");
            return Err(refused(refusal));
        }
        let ended_streams = self.shared.streams.count();
        self.shared.store.start_draining();
        self.shared.drain.send_replace(true);
        if tokio::time::timeout(DRAIN_TIMEOUT, self.shared.streams.none()).await.is_err() {
            tracing::warn!("{} streams have not ended in {DRAIN_TIMEOUT:?}", self.shared.streams.count());
        }
        Ok(Response::new(v1::DrainResponse { ended_streams }))
    }

    async fn release_unit(
        &self,
        request: Request<v1::ReleaseUnitRequest>,
    ) -> Result<Response<v1::ReleaseUnitResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let consumer_group =
            identifier(&request.consumer_group, "consumer_group", ConsumerGroupId::parse).map_err(refused)?;
        let unit = UnitId::new(request.unit_id);
        self.shared
            .decide(|reply| Command::ReleaseUnit { run, consumer_group, unit, drop: request.drop, reply })
            .await?;
        Ok(Response::new(v1::ReleaseUnitResponse {}))
    }

    async fn release_group(
        &self,
        request: Request<v1::ReleaseGroupRequest>,
    ) -> Result<Response<v1::ReleaseGroupResponse>, Status> {
        let request = request.into_inner();
        let run = run_id(&request.run_id)?;
        let group = identifier(&request.group_id, "group_id", GroupId::parse).map_err(refused)?;
        self.shared.decide(|reply| Command::ReleaseGroup(run.clone(), group.clone(), reply)).await?;
        self.shared.caught_up().await?;
        let looks = self.shared.ask(|reply| Look::TheseGroups(run.clone(), vec![group.clone()], reply)).await?;
        let looks = looks.map_err(refused)?;
        // Its last rollout may have been forgotten just now.
        let look = looks.first().ok_or_else(|| refused(group_not_found(&run, &group)))?;
        Ok(Response::new(v1::ReleaseGroupResponse { group: Some(lists::group(look)) }))
    }

    async fn discard_rollout(
        &self,
        request: Request<v1::DiscardRolloutRequest>,
    ) -> Result<Response<v1::DiscardRolloutResponse>, Status> {
        let request = request.into_inner();
        let about = convert::report::rollout_ref(request.rollout.as_ref()).map_err(|refusal| refused(*refusal))?;
        let reason = if request.reason.is_empty() { "operator".to_owned() } else { request.reason };
        let reason = convert::report::discard_reason(reason, "reason").map_err(refused)?;
        let disposition = convert::report::disposition(request.disposition, "disposition").map_err(refused)?;
        // A newer attempt than there is would be opened only to be discarded.
        if self.shared.store.attempt(&about.key()).is_none_or(|known| known < about.attempt) {
            self.shared.store.durable(self.shared.store.last_position()).await;
            let message =
                format!("run {:?} has no attempt {} of rollout {:?}", about.run, about.attempt, about.rollout);
            return Err(refused(Refusal::new(Reason::RolloutNotFound, message).field("rollout.rollout_id")));
        }
        let discard = Event::Discard { reason, disposition, by: DiscardedBy::Operator };
        let answer = self.shared.store.report(None, &about, discard, |_, _| ()).await;
        self.shared.store.durable(answer.position).await;
        let ended = match answer.reply {
            Reply::Accepted((), ended) => ended,
            Reply::AlreadyEnded(ended) => Some(ended),
            Reply::Duplicate(()) => None,
            Reply::Refused(refusal) => return Err(status::status(&refusal, Some(&about))),
        };
        Ok(Response::new(v1::DiscardRolloutResponse { ended: ended.as_ref().map(ended_message) }))
    }
}
