//! `hedgerow tail`: a run's rows as JSON lines, by an ephemeral subscription, which holds nothing back and needs no acks.

use std::collections::{HashSet, VecDeque};
use std::io::{self, Write as _};

use clap::Args;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::transport::Channel;
use xxhash_rust::xxh3::xxh3_128;

use super::again::{self, Cut, PATIENCE};
use super::assemble::{RowAssembler, WholeUnit};
use super::row_json::row_json;
use super::{Failure, ServiceAddress, client, remark};
use crate::proto::v1::{
    ConsumerGroupSettings, GetRunRequest, StartPosition, SubscribeRequest, SubscribeResponse, Subscription,
    SubscriptionHeartbeat, Unit, UnitNotice, UnitNoticeKind, subscribe_request, subscribe_response,
};

/// Nothing is acknowledged, so the window must hold everything that ever comes.
const CREDIT_TOKENS: u64 = 1 << 60;

/// What `tail` takes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hedgerow tail --run r1                            every row, and those to come
  hedgerow tail --run r1 --no-follow > rows.jsonl   those that are there
  hedgerow tail --run r1 --count 1 | jq .trains     the first")]
pub struct TailArguments {
    /// Where the service is
    #[command(flatten)]
    pub service: ServiceAddress,
    /// The run
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub run: String,
    /// Only rows of this policy
    #[arg(long, value_name = "POLICY", default_value = "", hide_default_value = true)]
    pub policy: String,
    /// Leave out calls that are longer than this
    #[arg(long, value_name = "TOKENS", default_value_t = 0, hide_default_value = true)]
    pub max_row_tokens: u64,
    /// Stop after as many rows
    #[arg(long, value_name = "N")]
    pub count: Option<u64>,
    /// Stop when nothing is queued any more
    #[arg(long)]
    pub no_follow: bool,
}

/// Prints rows until there is a reason to stop. If the stream is cut it is opened again: all rows that are still there come once
/// more, and those that were printed are left out.
///
/// # Errors
/// [`Failure::Failed`] if the service is not there or goes away for long, ends the subscription, or sends what makes no rows.
pub async fn run(arguments: TailArguments) -> Result<(), Failure> {
    let left = arguments.count.unwrap_or(u64::MAX);
    if left == 0 {
        return Ok(());
    }
    let address = arguments.service.address.clone();
    let mut channel = client::connect(&address).await?;
    check_run(channel.clone(), &arguments).await?;
    let mut tail = Tail { arguments, left, printed: Printed::default(), last_came: Instant::now() };
    loop {
        let (delay, status) = match tail.stream(channel).await {
            Ok(()) => return Ok(()),
            Err(Cut::Final(failure)) => return Err(failure),
            Err(Cut::Retry(delay, status)) => (delay, status),
        };
        remark(&format!("hedgerow: {}; going on when the service is there again", client::refused(STREAM, &status)));
        channel = again::connect(&address, delay, tail.last_came).await?;
        if tail.last_came.elapsed() > PATIENCE {
            return Err(client::refused(STREAM, &status));
        }
    }
}

/// What has ended if the stream has.
const STREAM: &str = "the subscription ended";

/// One who prints rows, over one stream and the next.
struct Tail {
    arguments: TailArguments,
    /// Rows that are still wanted.
    left: u64,
    printed: Printed,
    /// When something came last.
    last_came: Instant,
}

impl Tail {
    /// One stream, until there is a reason to stop or it is cut.
    async fn stream(&mut self, channel: Channel) -> Result<(), Cut> {
        let (outgoing, requests) = mpsc::channel(4);
        let subscription = subscribe_request::Request::Subscription(subscription(&self.arguments));
        let opening = SubscribeRequest { request: Some(subscription) };
        outgoing.send(opening).await.map_err(|error| Cut::Final(Failure::Failed(error.to_string())))?;
        let opened = client::trainer(channel).subscribe(ReceiverStream::new(requests)).await;
        let mut responses = opened.map_err(|status| Cut::by(STREAM, status))?.into_inner();
        let mut assembler = RowAssembler::default();
        while let Some(response) = responses.message().await.map_err(|status| Cut::by(STREAM, status))? {
            self.last_came = Instant::now();
            if self.take(response, &mut assembler).map_err(Cut::Final)? {
                return Ok(());
            }
        }
        Err(Cut::by(STREAM, Status::unavailable("the service ended the stream")))
    }

    /// Takes a message; true if there is a reason to stop.
    fn take(&mut self, response: SubscribeResponse, assembler: &mut RowAssembler) -> Result<bool, Failure> {
        match response.response {
            Some(subscribe_response::Response::UnitPart(part)) => {
                let unit = assembler.take(part).map_err(|error| Failure::Failed(error.to_string()))?;
                if let Some(mut unit) = unit {
                    unit.rows.retain(|row| self.printed.is_new(&row.row_id));
                    self.left = self.left.saturating_sub(write_rows(&unit, self.left)?);
                }
                Ok(self.left == 0)
            }
            Some(subscribe_response::Response::Heartbeat(heartbeat)) => {
                Ok(self.arguments.no_follow && nothing_is_queued(&heartbeat))
            }
            Some(subscribe_response::Response::UnitNotice(notice)) => {
                remark_on(&notice);
                Ok(false)
            }
            Some(subscribe_response::Response::Subscribed(_) | subscribe_response::Response::AckResult(_)) | None => {
                Ok(false)
            }
        }
    }
}

/// The rows that were printed last: they may come again on the next stream.
#[derive(Default)]
struct Printed {
    known: HashSet<u128>,
    in_order: VecDeque<u128>,
}

/// More rows than are printed and still there when a stream is opened again are not told from new ones.
const PRINTED_ROWS_MAX: usize = 1 << 20;

impl Printed {
    /// Whether it was not printed; now it is.
    fn is_new(&mut self, row_id: &str) -> bool {
        let digest = xxh3_128(row_id.as_bytes());
        if !self.known.insert(digest) {
            return false;
        }
        self.in_order.push_back(digest);
        if self.in_order.len() > PRINTED_ROWS_MAX
            && let Some(oldest) = self.in_order.pop_front()
        {
            self.known.remove(&oldest);
        }
        true
    }
}

/// A subscription makes its run: who misspells its name should not wait for rows that cannot come.
async fn check_run(channel: tonic::transport::Channel, arguments: &TailArguments) -> Result<(), Failure> {
    let answer = client::admin(channel).get_run(GetRunRequest { run_id: arguments.run.clone() }).await;
    let status = match answer {
        Ok(_) => return Ok(()),
        Err(status) => status,
    };
    if status.code() != tonic::Code::NotFound {
        return Err(client::refused(&arguments.run, &status));
    }
    if arguments.no_follow {
        let message = format!("there is no run {:?}; `hedgerow runs` lists those that there are", arguments.run);
        return Err(Failure::Failed(message));
    }
    remark(&format!("hedgerow: there is no run {:?} yet; it is made now, and its rows are awaited", arguments.run));
    Ok(())
}

fn subscription(arguments: &TailArguments) -> Subscription {
    let settings = ConsumerGroupSettings {
        policy: arguments.policy.clone(),
        unit: Unit::Row.into(),
        max_row_tokens: arguments.max_row_tokens,
        start: StartPosition::Earliest.into(),
        ..ConsumerGroupSettings::default()
    };
    Subscription {
        run_id: arguments.run.clone(),
        consumer: format!("tail-{}", std::process::id()),
        settings: Some(settings),
        credit_tokens: CREDIT_TOKENS,
        ephemeral: true,
        heartbeat_interval: arguments.no_follow.then_some(prost_types::Duration { seconds: 1, nanos: 0 }),
        ..Subscription::default()
    }
}

/// Writes some rows, and says how many.
fn write_rows(unit: &WholeUnit, most: u64) -> Result<u64, Failure> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut written = 0;
    for row in &unit.rows {
        if written == most {
            break;
        }
        let json = row_json(row).map_err(|error| Failure::Failed(error.to_string()))?;
        writeln!(out, "{json}")?;
        written += 1;
    }
    out.flush()?;
    Ok(written)
}

fn nothing_is_queued(heartbeat: &SubscriptionHeartbeat) -> bool {
    heartbeat.queued_units == 0
}

/// What a reader of rows would miss otherwise.
fn remark_on(notice: &UnitNotice) {
    let what = match notice.kind() {
        UnitNoticeKind::Skipped => "units were skipped: this reader was too slow",
        UnitNoticeKind::TooLong => "calls were left out: they are too long",
        UnitNoticeKind::NoRows => "rollouts were finalised without a row for this reader",
        UnitNoticeKind::GroupDropped => "groups were dropped",
        UnitNoticeKind::Late => "rollouts came after their group had been released",
        UnitNoticeKind::Retention => "units were no longer retained",
        UnitNoticeKind::Unspecified
        | UnitNoticeKind::Undeliverable
        | UnitNoticeKind::Stale
        | UnitNoticeKind::Operator
        | UnitNoticeKind::LeaseEnded
        | UnitNoticeKind::GroupExpires => return,
    };
    let about = [notice.group_id.as_str(), notice.rollout_id.as_str(), notice.reason.as_str()];
    let about: Vec<&str> = about.into_iter().filter(|text| !text.is_empty()).collect();
    remark(&format!("hedgerow: {} × {what} ({})", notice.units, about.join(", ")));
}
