//! What a consumer group is: its settings, where it begins, what its units are, and consumers that come back.

use hedgerow::proto::v1::report_request::Event;
use hedgerow::proto::v1::{self, AckOutcome, AnswerOutcome};

use crate::queue_taker::{Taker, finish, reason, row, rows, unit_ids};
use crate::service::{TestService, Trainer, Worker, about, call, subscription};

fn group(consumer_group: &str, settings: v1::ConsumerGroupSettings) -> v1::Subscription {
    v1::Subscription { settings: Some(settings), ..subscription("run", consumer_group) }
}

fn settings() -> v1::ConsumerGroupSettings {
    v1::ConsumerGroupSettings::default()
}

async fn refused(service: &TestService, subscription: v1::Subscription) -> tonic::Status {
    match Trainer::subscribe(service.channel().await, subscription).await {
        Ok(trainer) => panic!("{:?} was joined", trainer.subscribed),
        Err(status) => status,
    }
}

#[tokio::test]
async fn a_groups_settings_are_those_of_whoever_made_it() {
    let service = TestService::start().await;
    let rollouts = v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), max_row_tokens: 100, ..settings() };
    let made = Taker::join(&service, group("trainers", rollouts.clone())).await;
    let same = Taker::join(&service, group("trainers", rollouts.clone())).await;
    let silent = Taker::join(&service, subscription("run", "trainers")).await;
    assert_eq!([made, same, silent].map(|taker| taker.trainer.subscribed.created), [true, false, false]);
    for other in [
        settings(),
        v1::ConsumerGroupSettings { max_row_tokens: 101, ..rollouts.clone() },
        v1::ConsumerGroupSettings { policy: "main".to_owned(), ..rollouts },
    ] {
        let status = refused(&service, group("trainers", other)).await;
        assert_eq!(status.code(), tonic::Code::FailedPrecondition);
        assert_eq!(reason(&status), "consumer_group_conflict");
    }
}

#[tokio::test]
async fn a_group_begins_with_what_is_there_or_with_what_comes() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let before = rows(&mut worker, "run", 0, 2, 5).await;
    let latest = v1::ConsumerGroupSettings { start: v1::StartPosition::Latest.into(), ..settings() };
    let mut latest = Taker::join(&service, group("latest", latest)).await;
    let mut earliest = Taker::join(&service, group("earliest", settings())).await;
    let after = rows(&mut worker, "run", 2, 2, 5).await;
    assert_eq!(unit_ids(&latest.quiet().await), after);
    assert_eq!(unit_ids(&earliest.quiet().await), [before.clone(), after].concat());
    assert_eq!(latest.ack(&before).await, [AckOutcome::Unknown; 2], "it never had them");
}

#[tokio::test]
async fn declared_groups_hold_rows_back_before_anybody_subscribes() {
    let service = TestService::start().await;
    let declared = |name: &str, settings| v1::ConsumerGroupDeclaration {
        consumer_group: name.to_owned(),
        settings: Some(settings),
    };
    let rollouts = v1::ConsumerGroupSettings { unit: v1::Unit::Rollout.into(), ..settings() };
    let consumer_groups = vec![declared("rows", settings()), declared("rollouts", rollouts)];
    service.create_run("run", v1::RunSettings { consumer_groups, ..v1::RunSettings::default() }).await;
    let mut worker = service.worker().await;
    let unit = row(&mut worker, "run", "x", 5).await;
    let mut taker = Taker::join(&service, subscription("run", "rows")).await;
    assert!(!taker.trainer.subscribed.created);
    assert_eq!(taker.unit().await.unit_id, unit);
    taker.ack(&[unit]).await;
    let answer = worker.report(&about("run", "x"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::Duplicate, "the other declared group holds it");
    let mut other = Taker::join(&service, subscription("run", "rollouts")).await;
    let unit = other.unit().await.unit_id;
    assert_eq!(unit, "run/x/0", "declared to take rollouts");
    other.ack(&[unit]).await;
    let answer = worker.report(&about("run", "x"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
    let status = refused(&service, group("rows", v1::ConsumerGroupSettings { max_row_tokens: 9, ..settings() })).await;
    assert_eq!(reason(&status), "consumer_group_conflict");
}

/// A rollout with a root of policy `actor`, below it one call of `actor` and one of `critic`.
async fn two_policies(worker: &mut Worker, rollout: &str) {
    let reference = about("run", rollout);
    for (id, policy, prompt, generation) in [
        ("root", "actor", &[1][..], &[2, 3][..]),
        ("judge", "critic", &[1, 2, 3, 9], &[4]),
        ("next", "actor", &[1, 2, 3, 8], &[5, 6, 7]),
    ] {
        let call = v1::Call { policy: policy.to_owned(), ..call(id, "main", 1, prompt, generation) };
        let answer = worker.report(&reference, Event::Call(call)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Accepted, "{answer:?}");
    }
    worker.report(&reference, finish(1.0)).await;
}

#[tokio::test]
async fn each_group_takes_one_policy_or_all_as_rows_or_as_rollouts() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    two_policies(&mut worker, "x").await;
    let of = |policy: &str, unit: v1::Unit| v1::ConsumerGroupSettings {
        policy: policy.to_owned(),
        unit: unit.into(),
        ..settings()
    };
    let mut rows_of_all = Taker::join(&service, group("rows", of("", v1::Unit::Row))).await;
    assert_eq!(unit_ids(&rows_of_all.quiet().await), ["run/x/0/actor/next", "run/x/0/critic/judge"]);
    let mut critic = Taker::join(&service, group("critic", of("critic", v1::Unit::Row))).await;
    let unit = critic.unit().await;
    assert_eq!(unit.rows[0].trains(), ["judge"]);
    assert_eq!(unit.rows[0].loss_mask, [0, 0, 0, 0, 1], "another policy's tokens are context");
    let mut whole = Taker::join(&service, group("whole", of("", v1::Unit::Rollout))).await;
    let unit = whole.unit().await;
    assert_eq!((unit.unit_id.as_str(), unit.tokens, unit.rows.len()), ("run/x/0", 12, 2));
    let mut actor = Taker::join(&service, group("actor", of("actor", v1::Unit::Rollout))).await;
    let unit = actor.unit().await;
    assert_eq!((unit.unit_id.as_str(), unit.tokens, unit.rows[0].trains()), ("run/x/0/actor", 7, vec!["root", "next"]));
    let mut nobody = Taker::join(&service, group("nobody", of("planner", v1::Unit::Row))).await;
    assert!(nobody.quiet().await.is_empty());
    for (taker, units) in [
        (&mut rows_of_all, vec!["run/x/0/actor/next", "run/x/0/critic/judge"]),
        (&mut critic, vec!["run/x/0/critic/judge"]),
        (&mut whole, vec!["run/x/0"]),
        (&mut actor, vec!["run/x/0/actor"]),
    ] {
        let answer = worker.report(&about("run", "x"), finish(1.0)).await;
        assert_eq!(answer.outcome(), AnswerOutcome::Duplicate, "held until every group is done");
        taker.ack(&units).await;
    }
    let answer = worker.report(&about("run", "x"), finish(1.0)).await;
    assert_eq!(answer.outcome(), AnswerOutcome::AlreadyEnded);
}

#[tokio::test]
async fn a_policy_that_the_run_does_not_train_is_refused() {
    let service = TestService::start().await;
    let trained = v1::RunSettings { trained_policies: vec!["actor".to_owned()], ..v1::RunSettings::default() };
    service.create_run("run", trained).await;
    let critic = v1::ConsumerGroupSettings { policy: "critic".to_owned(), ..settings() };
    let status = refused(&service, group("critic", critic)).await;
    assert_eq!((status.code(), reason(&status).as_str()), (tonic::Code::InvalidArgument, "invalid_value"));
    let mut worker = service.worker().await;
    let mut all = Taker::join(&service, subscription("run", "all")).await;
    two_policies(&mut worker, "x").await;
    assert_eq!(unit_ids(&all.quiet().await), ["run/x/0/actor/next"]);
}

#[tokio::test]
async fn a_group_leaves_out_what_is_too_long_for_it() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    two_policies(&mut worker, "x").await;
    let short = v1::ConsumerGroupSettings { policy: "actor".to_owned(), max_row_tokens: 6, ..settings() };
    let mut short = Taker::join(&service, group("short", short)).await;
    let unit = short.unit().await;
    assert_eq!(unit.unit_id, "run/x/0/actor/root", "the longer call is out, so its parent is the leaf");
    assert_eq!(unit.rows[0].token_ids, [1, 2, 3]);
    let exact = v1::ConsumerGroupSettings { policy: "actor".to_owned(), max_row_tokens: 7, ..settings() };
    let mut exact = Taker::join(&service, group("exact", exact)).await;
    assert_eq!(exact.unit().await.unit_id, "run/x/0/actor/next");
    let none = v1::ConsumerGroupSettings { max_row_tokens: 2, ..settings() };
    let mut none = Taker::join(&service, group("none", none)).await;
    assert!(none.quiet().await.is_empty());
}

fn named(consumer: &str, held: &[&str]) -> v1::Subscription {
    v1::Subscription {
        consumer: consumer.to_owned(),
        held_unit_ids: held.iter().map(|unit| (*unit).to_owned()).collect(),
        ..subscription("run", "trainers")
    }
}

#[tokio::test]
async fn a_consumer_that_comes_back_keeps_what_it_holds_and_learns_what_it_lost() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let made = rows(&mut worker, "run", 0, 5, 5).await;
    let mut one = Taker::join(&service, named("one", &[])).await;
    one.take_units(5).await;
    drop(one);
    let mut other = Taker::join(&service, v1::Subscription { credit_tokens: 5, ..named("other", &[]) }).await;
    assert_eq!(other.unit().await.unit_id, made[0]);
    assert_eq!(other.ack(&made[1..2]).await, [AckOutcome::Acknowledged]);
    let held = ["run/never/0/main/c", &made[0], &made[1], &made[3], &made[3]];
    let mut again = Taker::join(&service, named("one", &held)).await;
    assert_eq!(again.trainer.subscribed.held_unit_ids, made[3..4]);
    assert_eq!(again.trainer.subscribed.lost_unit_ids, ["run/never/0/main/c", &made[0], &made[1]]);
    let units = again.quiet().await;
    assert_eq!(unit_ids(&units), [made[2].as_str(), &made[4]], "what it holds is not sent again");
    assert!(units.iter().all(|unit| unit.delivery_count == 2));
    assert_eq!(again.ack(&made[3..4]).await, [AckOutcome::Acknowledged]);
}

#[tokio::test]
async fn a_stream_under_the_same_name_takes_over_and_ends_the_older() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let made = rows(&mut worker, "run", 0, 3, 5).await;
    let mut older = Taker::join(&service, named("one", &[])).await;
    older.take_units(3).await;
    let mut newer = Taker::join(&service, named("one", &[&made[1]])).await;
    assert_eq!(newer.trainer.subscribed.held_unit_ids, made[1..2]);
    let end = older.end().await.unwrap();
    assert_eq!((end.code(), reason(&end).as_str()), (tonic::Code::FailedPrecondition, "consumer_in_use"));
    assert_eq!(unit_ids(&newer.quiet().await), [made[0].as_str(), &made[2]], "what it does not hold comes again");
    let mut nameless = [Taker::join(&service, named("", &[])).await, Taker::join(&service, named("", &[])).await];
    for taker in &mut nameless {
        assert!(taker.quiet().await.is_empty(), "consumers without a name are not each other");
    }
}

#[tokio::test]
async fn a_subscription_that_is_none_is_refused() {
    let service = TestService::start().await;
    let cases = [
        (subscription("", "trainers"), "invalid_identifier"),
        (subscription("run", ""), "missing_field"),
        (group("trainers", v1::ConsumerGroupSettings { unit: v1::Unit::Group.into(), ..settings() }), "invalid_value"),
        (
            group("trainers", v1::ConsumerGroupSettings { shape: v1::Shape::Tree.into(), ..settings() }),
            "not_in_this_release",
        ),
        (v1::Subscription { shard: Some(0), ..subscription("run", "trainers") }, "invalid_value"),
    ];
    for (subscription, expected) in cases {
        let status = refused(&service, subscription).await;
        assert_eq!(reason(&status), expected, "{status:?}");
    }
}
