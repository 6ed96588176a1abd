//! Finished rows to a subscribed trainer, against a bare stream of the same messages, made beforehand.

use std::time::Instant;

use futures_util::stream;
use hedgerow::cli::client;
use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::store::clock::Clock;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::kit::{Asked, Line, Report, Spread, Target, amount, interleaved, rates};
use crate::message::{Form, call, finish, request};
use crate::wire::{Machine, connect, report_all};
use crate::workload::{Size, conversation};

/// Generated ids of each row.
const GENERATED: usize = 100;
/// Units that a trainer acknowledges together.
const ACK_UNITS: usize = 32;

/// Rows of one length.
#[derive(Clone, Copy)]
struct Rows {
    tokens: usize,
    count: usize,
    /// What Reverb gave of such rows, in rows a second, as recorded on such a machine: the most.
    reverb: Option<f64>,
}

/// Rows of 1 k, 20 k and 100 k ids.
pub(crate) fn rows_out(asked: &Asked, report: &mut Report) {
    let all = [
        Rows { tokens: 1000, count: asked.size(4000, 40_000), reverb: Some(21_000.0) },
        Rows { tokens: 20_000, count: asked.size(300, 3000), reverb: Some(9000.0) },
        Rows { tokens: 100_000, count: asked.size(60, 600), reverb: None },
    ];
    for rows in all {
        measure(asked, report, rows);
    }
}

fn measure(asked: &Asked, report: &mut Report, rows: Rows) {
    let machine = Machine::new();
    let service = machine.service(Clock::machine());
    let address = service.grpc_address.to_string();
    let mut round = 0;
    let mut next_run = || {
        round += 1;
        let run = format!("run-{round}");
        machine.client.block_on(fill(&address, &run, rows, round));
        run
    };
    let run = next_run();
    let (_, messages) = machine.client.block_on(drain(&address, &run, rows, true));
    let bare_address = machine.bare(messages);
    let ours = || {
        let run = next_run();
        machine.client.block_on(drain(&address, &run, rows, false)).0
    };
    let bare = || machine.client.block_on(drain(&bare_address, "bare", rows, false)).0;
    let (ours, bare) = interleaved(asked.rounds, ours, bare);
    let rate = |seconds: Vec<f64>| seconds.into_iter().map(|took| rows.count as f64 / took).collect::<Vec<_>>();
    let runs = (rate(ours), rate(bare));
    let what = format!("rows out, {} k tokens ({} rows)", rows.tokens / 1000, rows.count);
    report.add(rates(what, "rows/s", &runs, Target::AtLeast(0.7)));
    if let Some(reverb) = rows.reverb {
        report.add(Line {
            what: format!("rows out, {} k tokens, Reverb as recorded", rows.tokens / 1000),
            ours: amount(Spread::of(&runs.0).median, "rows/s"),
            limit: amount(reverb, "rows/s"),
            ratio: Spread::of(&runs.0.iter().map(|rate| rate / reverb).collect::<Vec<_>>()),
            target: Target::AtLeast(1.0),
        });
    }
    machine.server.block_on(service.stop());
}

/// Reports rollouts of one call each, and finishes them; every row has ids of its own.
async fn fill(address: &str, run: &str, rows: Rows, round: u64) {
    let size = Size { calls: 1, prompt: 0, generation: GENERATED };
    let mut random = SplitMix64::new(round);
    let run = run.to_owned();
    let requests = (0..rows.count).flat_map(move |row| {
        let rollout = conversation(random.next_u64(), rows.tokens - GENERATED, size);
        let call = call(&rollout, &rollout.calls[0], Form::Full);
        let name = format!("rollout-{row}");
        let of = |seq: usize, event| request(&run, &name, (2 * row + seq) as u64, event);
        [of(1, Event::Call(call)), of(2, finish())]
    });
    report_all(connect(address).await, stream::iter(requests)).await;
}

/// Takes all rows of a run, acknowledging them; the seconds from the subscription to the last row, and the messages if wanted.
async fn drain(address: &str, run: &str, rows: Rows, keep: bool) -> (f64, Vec<v1::SubscribeResponse>) {
    let mut trainer = client::trainer(connect(address).await);
    // There is room for every acknowledgement, for a bare server does not take them.
    let (requests, line) = mpsc::channel(rows.count / ACK_UNITS + 8);
    let subscription = v1::Subscription {
        run_id: run.to_owned(),
        consumer_group: "bench".to_owned(),
        credit_tokens: 1 << 40,
        settings: Some(v1::ConsumerGroupSettings { unit: v1::Unit::Row.into(), ..Default::default() }),
        ..v1::Subscription::default()
    };
    let send = |request| v1::SubscribeRequest { request: Some(request) };
    let start = Instant::now();
    requests.send(send(Request::Subscription(subscription))).await.expect("a new line has room");
    let responses = trainer.subscribe(ReceiverStream::new(line)).await.expect("the subscription is joined");
    let mut responses = responses.into_inner();
    let (mut units, mut tokens, mut held, mut kept) = (0, 0, Vec::new(), Vec::new());
    while units < rows.count {
        let message = responses.message().await.expect("no error").expect("the stream goes on");
        let Some(Response::UnitPart(part)) = &message.response else { continue };
        tokens += part.rows.iter().map(|row| row.token_ids.len() / 4).sum::<usize>();
        if part.last {
            units += 1;
            held.push(part.unit_id.clone());
        }
        if held.len() == ACK_UNITS {
            let unit_ids = std::mem::take(&mut held);
            let _ = requests.try_send(send(Request::Ack(v1::Ack { unit_ids, seek_count: 0 })));
        }
        if keep {
            kept.push(message);
        }
    }
    let took = start.elapsed().as_secs_f64();
    assert_eq!(tokens, rows.tokens * rows.count, "every row came whole");
    // The last units too, so that the run's memory goes.
    let _ = requests.try_send(send(Request::Ack(v1::Ack { unit_ids: held, seek_count: 0 })));
    drop(requests);
    while let Ok(Some(_)) = responses.message().await {}
    (took, kept)
}
