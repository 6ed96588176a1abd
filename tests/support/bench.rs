//! Many rollouts at once, reported over a few streams in any way, up to where each is finalised or has ended.

use std::collections::BTreeSet;
use std::time::Duration;

use hedgerow::cli::shuffle::SplitMix64;
use hedgerow::proto::v1::inspect_service_client::InspectServiceClient;
use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AnswerOutcome, RolloutState};
use tokio::sync::oneshot;
use tonic::transport::Channel;

use crate::case::{Case, Link};
use crate::feed::{Form, Mention};
use crate::reporter::Reporter;
use crate::service::{TestService, reward};
use crate::wire;

/// More than any wait for missing calls and parents lasts.
const PATIENCE: Duration = Duration::from_secs(11 * 60);
/// How often a rollout is looked at after time went by, until its decision is taken.
const LOOKS_MAX: usize = 20_000;

/// How a harness tells of a case.
#[derive(Clone, Debug)]
pub(crate) struct Telling {
    pub(crate) mentions: Vec<Mention>,
    pub(crate) order: Order,
    pub(crate) lists: Lists,
    pub(crate) seal: Seal,
    /// What chance decides rests on it: which stream takes which event, and where seal and reward stand among the calls.
    pub(crate) seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Over one stream, so that events arrive in this order.
    AsTold,
    /// Over all streams at once.
    OverAllStreams,
}

/// Who gives the kept lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lists {
    BySeal,
    /// Each agent at its end, somewhere among the calls.
    ByAgents,
}

/// When a rollout is sealed and rewarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seal {
    /// When all else is answered.
    Last,
    /// Anywhere among the calls, with the lists or else with how many calls there are.
    Among,
}

/// One rollout to be reported.
pub(crate) struct Job<'a> {
    pub(crate) about: v1::RolloutRef,
    pub(crate) case: &'a Case,
    pub(crate) telling: Telling,
    pub(crate) reward: f64,
}

/// What became of a rollout.
pub(crate) struct Told {
    /// The calls that were accepted; those after the rollout was finalised were not.
    pub(crate) accepted: BTreeSet<usize>,
    /// The rollout as it is shown, with the policy and the limit of its case.
    pub(crate) shown: v1::GetRolloutResponse,
}

/// A service and those who report to it.
pub(crate) struct Bench {
    pub(crate) service: TestService,
    reporters: Vec<Reporter>,
    inspect: InspectServiceClient<Channel>,
}

#[derive(Clone, Debug)]
enum Step {
    Mention(Mention),
    AgentEnd(String),
    Seal,
    Reward,
    Finish,
}

/// An event that was sent.
struct Sent {
    job: usize,
    call: Option<(usize, bool)>,
    answer: oneshot::Receiver<v1::Answer>,
}

#[derive(Default)]
struct Progress {
    accepted: BTreeSet<usize>,
    /// Calls that are known to have their ids.
    placed: BTreeSet<usize>,
    fault: Option<String>,
}

impl Bench {
    pub(crate) async fn start(streams: usize) -> Self {
        let service = TestService::start().await;
        let mut reporters = Vec::new();
        for _ in 0..streams {
            reporters.push(Reporter::open(service.channel().await).await);
        }
        let inspect = service.inspect().await;
        Self { service, reporters, inspect }
    }

    /// Reports rollouts, their events interleaved, and waits until each is finalised or has ended.
    pub(crate) async fn report(&mut self, jobs: &[Job<'_>]) -> Vec<Result<Told, String>> {
        let mut progress: Vec<Progress> = jobs.iter().map(|_| Progress::default()).collect();
        self.send_all(jobs, &mut progress, jobs.iter().map(steps).collect()).await;
        let resends = jobs.iter().zip(&progress).map(|(job, progress)| {
            let pending = (0..job.case.calls.len()).filter(|call| !progress.placed.contains(call));
            pending.map(|call| (0, Step::Mention(Mention { call, form: Form::Full }))).collect()
        });
        let resends = resends.collect();
        self.send_all(jobs, &mut progress, resends).await;
        let seals = jobs.iter().map(|job| match job.telling.seal {
            Seal::Among => Vec::new(),
            Seal::Last if job.telling.seed.is_multiple_of(2) => vec![(0, Step::Finish)],
            Seal::Last => vec![(0, Step::Reward), (0, Step::Seal)],
        });
        self.send_all(jobs, &mut progress, seals.collect()).await;
        for (job, progress) in jobs.iter().zip(&mut progress) {
            let missing = job.telling.seal == Seal::Last && progress.accepted.len() < job.case.calls.len();
            if missing && progress.fault.is_none() {
                progress.fault = Some(format!("only {:?} of its calls were accepted", progress.accepted));
            }
        }
        self.look(jobs, progress).await
    }

    /// Sends one step of each job after another, and takes all answers.
    async fn send_all(&mut self, jobs: &[Job<'_>], progress: &mut [Progress], steps: Vec<Vec<(usize, Step)>>) {
        let mut sent = Vec::new();
        for round in 0..steps.iter().map(Vec::len).max().unwrap_or(0) {
            for (job, steps) in steps.iter().enumerate() {
                let Some((chance, step)) = steps.get(round) else { continue };
                let stream = chance % self.reporters.len();
                let about = &jobs[job];
                let answer = self.reporters[stream].send(&about.about, event(about, step)).await;
                let call = match step {
                    Step::Mention(mention) => Some((mention.call, mention.form == Form::Full)),
                    Step::AgentEnd(_) | Step::Seal | Step::Reward | Step::Finish => None,
                };
                sent.push(Sent { job, call, answer });
            }
        }
        for sent in sent {
            let answer = sent.answer.await.expect("the stream goes on");
            progress[sent.job].take(&jobs[sent.job], sent.call, &answer);
        }
    }

    async fn look(&mut self, jobs: &[Job<'_>], progress: Vec<Progress>) -> Vec<Result<Told, String>> {
        let mut told = Vec::new();
        for (looking, progress) in self.show_all(jobs).await.into_iter().zip(progress) {
            told.push(match progress.fault {
                Some(fault) => Err(fault),
                None => Ok(Told { accepted: progress.accepted, shown: looking }),
            });
        }
        let waits = |told: &Result<Told, String>| told.as_ref().is_ok_and(|told| !is_over(&told.shown));
        let mut time_went_by = false;
        for (job, told) in jobs.iter().zip(&mut told) {
            if waits(told) && !may_wait(job.case) {
                *told = Err("it waits for something".to_owned());
            } else if waits(told) {
                if !time_went_by {
                    self.service.clock.advance(PATIENCE);
                    time_went_by = true;
                }
                let Ok(told) = told else { continue };
                let request = show(job);
                for _ in 0..LOOKS_MAX {
                    if is_over(&told.shown) {
                        break;
                    }
                    tokio::task::yield_now().await;
                    told.shown = self.inspect.get_rollout(request.clone()).await.expect("it is shown").into_inner();
                }
            }
            if waits(told) {
                *told = Err("it waits, though its time is over".to_owned());
            }
        }
        told
    }

    async fn show_all(&self, jobs: &[Job<'_>]) -> Vec<v1::GetRolloutResponse> {
        let looks = jobs.iter().map(|job| {
            let (mut inspect, request) = (self.inspect.clone(), show(job));
            tokio::spawn(async move { inspect.get_rollout(request).await.expect("it is shown").into_inner() })
        });
        let looks: Vec<_> = looks.collect();
        let mut shown = Vec::new();
        for look in looks {
            shown.push(look.await.expect("a look does not fail"));
        }
        shown
    }
}

impl Progress {
    fn take(&mut self, job: &Job<'_>, call: Option<(usize, bool)>, answer: &v1::Answer) {
        let reason = answer.refusal.as_ref().map(|refusal| refusal.reason.as_str());
        let early = job.telling.seal == Seal::Among;
        match (answer.outcome(), call, reason) {
            (AnswerOutcome::Accepted | AnswerOutcome::Duplicate, Some((call, full)), _) => {
                self.accepted.insert(call);
                let waits = answer.verdict.as_ref().is_some_and(|verdict| verdict.kind() == v1::LinkKind::Waiting);
                if full || !waits {
                    self.placed.insert(call);
                }
            }
            (AnswerOutcome::Accepted | AnswerOutcome::Duplicate, None, _) => {}
            (AnswerOutcome::Refused, Some((_, false)), Some("resend_full_prompt")) => {}
            (AnswerOutcome::Refused, Some(_), Some("rollout_finalised")) if early => {}
            (AnswerOutcome::AlreadyEnded, _, _) if early => {}
            _ => {
                let what = call.map(|(call, full)| (&job.case.calls[call].id, full));
                self.fault.get_or_insert_with(|| format!("{what:?} was answered {answer:?}"));
            }
        }
    }
}

/// What is reported at first, each step with what decides about its stream.
fn steps(job: &Job<'_>) -> Vec<(usize, Step)> {
    let telling = &job.telling;
    let mut chance = SplitMix64::new(telling.seed);
    let mut steps: Vec<Step> = telling.mentions.iter().cloned().map(Step::Mention).collect();
    let mut scatter = |step: Step, chance: &mut SplitMix64| {
        let place = chance.below(steps.len() + 1);
        steps.insert(place, step);
    };
    if lists_by_agents(job) {
        for agent in job.case.kept.iter().flatten() {
            scatter(Step::AgentEnd(agent.0.clone()), &mut chance);
        }
    }
    if telling.seal == Seal::Among {
        for step in [Step::Seal, Step::Reward, Step::Reward] {
            scatter(step, &mut chance);
        }
    }
    let fixed = chance.below(usize::MAX);
    let mut stream = || match telling.order {
        Order::AsTold => fixed,
        Order::OverAllStreams => chance.below(usize::MAX),
    };
    steps.into_iter().map(|step| (stream(), step)).collect()
}

/// Agents give their lists before a seal that gives none, or the seal would find nothing to wait for.
fn lists_by_agents(job: &Job<'_>) -> bool {
    let telling = &job.telling;
    let some = job.case.kept.as_ref().is_some_and(|lists| !lists.is_empty());
    some && telling.lists == Lists::ByAgents && telling.seal == Seal::Last
}

fn event(job: &Job<'_>, step: &Step) -> Event {
    let seal = || v1::Seal {
        kept: if lists_by_agents(job) { None } else { wire::kept(job.case) },
        expected_calls: (job.telling.seal == Seal::Among && job.case.kept.is_none())
            .then_some(job.case.calls.len() as u64),
    };
    match step {
        Step::Mention(mention) => Event::Call(wire::call(&job.case.calls[mention.call], &mention.form)),
        Step::AgentEnd(agent) => {
            let kept = wire::kept(job.case).and_then(|mut kept| kept.agents.remove(agent));
            let mut end = v1::AgentEnd { agent_id: agent.clone(), kept, ..v1::AgentEnd::default() };
            end.set_status(v1::AgentStatus::Settled);
            Event::AgentEnd(end)
        }
        Step::Seal => Event::Seal(seal()),
        Step::Reward => Event::Reward(reward(job.reward)),
        Step::Finish => Event::Finish(v1::Finish { seal: Some(seal()), reward: Some(reward(job.reward)) }),
    }
}

fn show(job: &Job<'_>) -> v1::GetRolloutRequest {
    let settings = &job.case.settings;
    v1::GetRolloutRequest {
        run_id: job.about.run_id.clone(),
        rollout_id: job.about.rollout_id.clone(),
        policy: settings.policy.clone(),
        max_row_tokens: settings.max_row_tokens.map_or(0, |limit| limit as u64),
    }
}

/// Finalised, or ended.
fn is_over(shown: &v1::GetRolloutResponse) -> bool {
    let state = shown.summary.as_ref().map(v1::RolloutSummary::state);
    matches!(state, Some(RolloutState::Finalised | RolloutState::Ended))
}

/// Whether something of the case never comes, so that only time completes it.
fn may_wait(case: &Case) -> bool {
    let comes = |id: &String| case.calls.iter().any(|call| call.id == *id);
    let kept_comes = case.kept.iter().flat_map(|lists| lists.values()).flatten().all(comes);
    let named_comes = |call: &crate::case::Call| match &call.link {
        Link::Parent(named) => comes(named),
        Link::Infer | Link::Root => true,
    };
    !(kept_comes && case.calls.iter().all(named_comes))
}
