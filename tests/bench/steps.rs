//! Steps for data-parallel ranks, against the same rollouts one by one to as many trainers; and many groups that are released in one
//! burst, against the same groups when they have been released already.

use std::time::Instant;

use futures_util::future::join_all;
use futures_util::stream;
use hedgerow::cli::client;
use hedgerow::proto::v1;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::subscribe_request::Request;
use hedgerow::proto::v1::subscribe_response::Response;
use hedgerow::store::clock::Clock;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use crate::kit::{Asked, Report, Target, rates};
use crate::message::{Form, call, finish, request};
use crate::wire::{Machine, connect, report_all};
use crate::workload::{Size, conversation, population_rollout};

const RANKS: u32 = 4;
const MICROBATCH_TOKENS: u64 = 64 << 10;
/// Members of a group.
const GROUP_SIZE: u64 = 16;
const RUN: &str = "run";

/// A step of 512 rollouts of the population, in four shards: from the subscriptions to the last row.
pub(crate) fn population(asked: &Asked, report: &mut Report) {
    let units = asked.size(64, 512);
    let machine = Machine::new();
    let service = machine.service(Clock::machine());
    let address = service.grpc_address.to_string();
    machine.client.block_on(async {
        create_run(&address, v1::Estimator::None).await;
        fill_population(&address, units).await;
    });
    let step = v1::StepSettings {
        units,
        counted_unit: v1::Unit::Rollout.into(),
        shards: RANKS,
        microbatch_tokens: MICROBATCH_TOKENS,
    };
    let in_steps = v1::ConsumerGroupSettings { unit: v1::Unit::Step.into(), step: Some(step), ..Default::default() };
    let alone = v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), ..Default::default() };
    // What is acknowledged is kept, and each round is another consumer group: so all are given the same.
    let mut round = 0;
    let mut take = |settings: &v1::ConsumerGroupSettings, units: usize| {
        round += 1;
        let group = format!("group-{round}");
        let took = machine.client.block_on(take_all(&address, &group, settings, units));
        assert!(took.tokens > 0, "rows came");
        took
    };
    let tokens = take(&alone, units as usize).tokens;
    let mut round_of = |settings: &v1::ConsumerGroupSettings, units: usize| {
        let took = take(settings, units);
        assert_eq!(took.tokens, tokens, "the same rows, without padding");
        took.tokens as f64 / took.seconds
    };
    let mut runs = (Vec::new(), Vec::new());
    for counts in 0..=asked.rounds {
        let (ours, limit) = (round_of(&in_steps, RANKS as usize), round_of(&alone, units as usize));
        if counts > 0 {
            runs.0.push(ours);
            runs.1.push(limit);
        }
    }
    let what =
        format!("a step of {units} rollouts of population in {RANKS} shards; against rollouts to {RANKS} trainers");
    report.add(rates(what, "tokens/s", &runs, Target::AtLeast(0.7)));
    machine.server.block_on(service.stop());
}

async fn fill_population(address: &str, units: u32) {
    let requests = (0..u64::from(units)).flat_map(|seed| {
        let rollout = population_rollout(seed);
        let name = format!("rollout-{seed}");
        let calls = rollout.calls.iter().map(|of| Event::Call(call(&rollout, of, Form::Delta)));
        let events: Vec<Event> = calls.chain([finish()]).collect();
        (1..).zip(events).map(move |(seq, event)| request(RUN, &name, seq, event)).collect::<Vec<_>>()
    });
    report_all(connect(address).await, stream::iter(requests)).await;
}

/// What a consumer group was given.
struct Took {
    /// From the subscriptions to the last row.
    seconds: f64,
    /// Tokens of all rows, without padding.
    tokens: u64,
}

/// Takes so many units of a consumer group, by four consumers; of steps, one shard each.
async fn take_all(address: &str, group: &str, settings: &v1::ConsumerGroupSettings, units: usize) -> Took {
    let channels = join_all((0..RANKS).map(|_| connect(address))).await;
    let (taken, mut left) = mpsc::channel(units + 1);
    let start = Instant::now();
    let ranks = channels.into_iter().zip(0..).map(|(channel, shard)| {
        let subscription = v1::Subscription {
            shard: settings.step.map(|_| shard),
            // So that the four of them share what there is.
            credit_tokens: if settings.step.is_some() { 1 << 40 } else { 1 << 20 },
            ..subscription(group, settings)
        };
        tokio::spawn(take(channel, subscription, taken.clone()))
    });
    let ranks: Vec<_> = ranks.collect();
    let mut tokens = 0;
    for _ in 0..units {
        tokens += left.recv().await.expect("the trainers go on");
    }
    let seconds = start.elapsed().as_secs_f64();
    ranks.iter().for_each(tokio::task::JoinHandle::abort);
    Took { seconds, tokens }
}

fn subscription(group: &str, settings: &v1::ConsumerGroupSettings) -> v1::Subscription {
    v1::Subscription {
        run_id: RUN.to_owned(),
        consumer_group: group.to_owned(),
        settings: Some(settings.clone()),
        credit_tokens: 1 << 40,
        ..v1::Subscription::default()
    }
}

/// Makes the run, which keeps what is acknowledged.
async fn create_run(address: &str, estimator: v1::Estimator) {
    let retention = Some(prost_types::Duration { seconds: 3600, nanos: 0 });
    let settings = v1::RunSettings { estimator: estimator.into(), retention, ..v1::RunSettings::default() };
    let create = v1::CreateRunRequest { run_id: RUN.to_owned(), settings: Some(settings) };
    client::admin(connect(address).await).create_run(create).await.expect("the run is made");
}

/// Takes units until it is stopped, says how many tokens each has, and acknowledges them.
async fn take(channel: Channel, subscription: v1::Subscription, taken: mpsc::Sender<u64>) {
    let mut trainer = client::trainer(channel);
    let (requests, line) = mpsc::channel(64);
    let send = |request| v1::SubscribeRequest { request: Some(request) };
    requests.send(send(Request::Subscription(subscription))).await.expect("a new line has room");
    let responses = trainer.subscribe(ReceiverStream::new(line)).await.expect("the subscription is joined");
    let (mut responses, mut tokens) = (responses.into_inner(), 0);
    while let Ok(Some(message)) = responses.message().await {
        let Some(Response::UnitPart(part)) = message.response else { continue };
        let is_padding = |row: &v1::RowPart| row.header.as_ref().is_some_and(|header| header.padding);
        let rows = part.rows.iter().filter(|row| !is_padding(row));
        tokens += rows.map(|row| row.token_ids.len() as u64 / 4).sum::<u64>();
        if part.last {
            let _ = taken.send(std::mem::take(&mut tokens)).await;
            let ack = v1::Ack { unit_ids: vec![part.unit_id], seek_count: 0 };
            let _ = requests.send(send(Request::Ack(ack))).await;
        }
    }
}

/// A thousand groups of 16 whose last members end at once: from the first of these to the last row of the last group.
pub(crate) fn groups_released(asked: &Asked, report: &mut Report) {
    let groups = asked.size(100, 1000);
    let machine = Machine::new();
    let whole = v1::ConsumerGroupSettings { unit: v1::Unit::Group.into(), ..Default::default() };
    let mut runs = (Vec::new(), Vec::new());
    let once = || {
        let service = machine.service(Clock::machine());
        let address = service.grpc_address.to_string();
        let (burst, again) = machine.client.block_on(release(&address, groups, &whole));
        machine.server.block_on(service.stop());
        (groups as f64 / burst, groups as f64 / again)
    };
    once();
    for _ in 0..asked.rounds {
        let (burst, again) = once();
        runs.0.push(burst);
        runs.1.push(again);
    }
    let what =
        format!("{groups} groups of {GROUP_SIZE} released in one burst; against the same groups, released already");
    report.add(rates(what, "groups/s", &runs, Target::AtLeast(0.3)));
}

/// The seconds from the first ending to the last group, and those in which another consumer group takes the same.
async fn release(address: &str, groups: u64, whole: &v1::ConsumerGroupSettings) -> (f64, f64) {
    create_run(address, v1::Estimator::Grpo).await;
    let (taken, mut left) = mpsc::channel(1024);
    let trainer = tokio::spawn(take(connect(address).await, subscription("first", whole), taken));
    let members = (0..groups).flat_map(|group| (0..GROUP_SIZE).map(move |member| (group, member)));
    let of_calls = members.clone().map(|(group, member)| {
        let rollout = conversation(group * GROUP_SIZE + member, 200, Size { calls: 1, prompt: 0, generation: 50 });
        member_request(group, member, 1, Event::Call(call(&rollout, &rollout.calls[0], Form::Full)))
    });
    let ends = |(group, member): (u64, u64)| member_request(group, member, 2, ended(member as f64));
    let all_but_one = members.filter(|(_, member)| *member > 0).map(ends);
    let opened = (0..groups).map(|group| {
        let open = v1::Open { group_size: Some(GROUP_SIZE as u32), ..v1::Open::default() };
        member_request(group, 0, 0, Event::Open(open))
    });
    report_all(connect(address).await, stream::iter(opened)).await;
    report_all(connect(address).await, stream::iter(of_calls)).await;
    report_all(connect(address).await, stream::iter(all_but_one)).await;
    let channel = connect(address).await;
    let start = Instant::now();
    let last = stream::iter((0..groups).map(move |group| ends((group, 0))));
    let ending = tokio::spawn(report_all(channel, last));
    for _ in 0..groups {
        left.recv().await.expect("the trainer goes on");
    }
    let burst = start.elapsed().as_secs_f64();
    ending.await.expect("all are taken");
    let (taken, mut left) = mpsc::channel(1024);
    let channel = connect(address).await;
    let start = Instant::now();
    let second = tokio::spawn(take(channel, subscription("second", whole), taken));
    for _ in 0..groups {
        left.recv().await.expect("the trainer goes on");
    }
    let again = start.elapsed().as_secs_f64();
    trainer.abort();
    second.abort();
    (burst, again)
}

fn member_request(group: u64, member: u64, seq: u64, event: Event) -> v1::ReportRequest {
    let mut request = request(RUN, &format!("rollout-{group}-{member}"), seq, event);
    request.rollout.iter_mut().for_each(|rollout| rollout.group_id = format!("group-{group}"));
    request
}

fn ended(value: f64) -> Event {
    let Event::Finish(finish) = finish() else { unreachable!("it is one") };
    Event::Finish(v1::Finish { reward: Some(v1::Reward { value, ..v1::Reward::default() }), ..finish })
}
