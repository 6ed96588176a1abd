//! Credit: how much is out at a consumer, and who gets the next unit.

use std::collections::BTreeMap;

use hedgerow::proto::v1;

use crate::queue_taker::{Taker, row, unit_ids};
use crate::service::{TestService, Unit, subscription};

/// A small random number generator whose seed is printed when a test fails.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number below `bound` (splitmix64).
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

fn with_credit(credit_tokens: u64) -> v1::Subscription {
    v1::Subscription { credit_tokens, ..subscription("run", "trainers") }
}

/// The next unit of either, and whose it is.
async fn either(a: &mut Taker, b: &mut Taker) -> (usize, Unit) {
    loop {
        for (whose, taker) in [&mut *a, &mut *b].into_iter().enumerate() {
            if let Some(unit) = taker.units.pop_front() {
                return (whose, unit);
            }
        }
        tokio::select! {
            taken = a.take() => taken.unwrap(),
            taken = b.take() => taken.unwrap(),
        }
    }
}

#[tokio::test]
async fn members_that_acknowledge_at_once_get_the_same_tokens_to_within_a_unit() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut takers = [
        Taker::join(&service, subscription("run", "trainers")).await,
        Taker::join(&service, subscription("run", "trainers")).await,
    ];
    let mut dice = Dice::new(17);
    let mut sums = [0_u64; 2];
    for rollout in 0..120 {
        let tokens = 2 + u32::try_from(dice.below(400)).unwrap();
        let made = row(&mut worker, "run", &rollout.to_string(), tokens).await;
        let [a, b] = &mut takers;
        let (whose, unit) = either(a, b).await;
        assert_eq!(unit.unit_id, made);
        sums[whose] += unit.tokens;
        takers[whose].ack(&[made]).await;
        assert!(sums[0].abs_diff(sums[1]) <= 401, "{sums:?} after {rollout}");
    }
}

#[tokio::test]
async fn what_waits_is_shared_evenly_between_members_that_do_not_acknowledge() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut a = Taker::join(&service, with_credit(0)).await;
    let mut b = Taker::join(&service, with_credit(0)).await;
    let mut dice = Dice::new(18);
    for rollout in 0..100 {
        let tokens = 2 + u32::try_from(dice.below(300)).unwrap();
        row(&mut worker, "run", &rollout.to_string(), tokens).await;
    }
    a.credit(u64::MAX).await;
    b.credit(u64::MAX).await;
    let (mut of_a, mut of_b) = (a.quiet().await, b.quiet().await);
    // The first to have credit may have been given all before the other had any.
    if of_a.is_empty() || of_b.is_empty() {
        let all = if of_a.is_empty() { &mut b } else { &mut a };
        let ids: Vec<String> = of_a.iter().chain(&of_b).map(|unit| unit.unit_id.clone()).collect();
        all.nack(&ids, None).await;
        (of_a, of_b) = (a.quiet().await, b.quiet().await);
    }
    let sum = |units: &[Unit]| units.iter().map(|unit| unit.tokens).sum::<u64>();
    assert_eq!(of_a.len() + of_b.len(), 100);
    assert!(sum(&of_a).abs_diff(sum(&of_b)) <= 301, "{} and {}", sum(&of_a), sum(&of_b));
}

#[tokio::test]
async fn never_more_is_out_than_the_window() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, with_credit(100)).await;
    let mut made = Vec::new();
    for (rollout, tokens) in [40, 40, 40, 30, 250, 10].into_iter().enumerate() {
        made.push(row(&mut worker, "run", &rollout.to_string(), tokens).await);
    }
    assert_eq!(unit_ids(&taker.quiet().await), made[..2], "40 more would be too much, and nothing overtakes");
    taker.ack(&made[..1]).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[2..3]);
    taker.ack(&made[1..2]).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[3..4]);
    taker.ack(&made[3..4]).await;
    assert!(taker.quiet().await.is_empty(), "what is larger than the window goes alone");
    taker.ack(&made[2..3]).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[4..5]);
    taker.ack(&made[4..5]).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[5..]);
}

#[tokio::test]
async fn a_window_of_nothing_stops_and_a_raised_one_goes_on() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    let mut taker = Taker::join(&service, with_credit(0)).await;
    let mut made = Vec::new();
    for rollout in 0..6 {
        made.push(row(&mut worker, "run", &rollout.to_string(), 10).await);
    }
    assert!(taker.quiet().await.is_empty());
    taker.credit(20).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[..2]);
    taker.credit(35).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[2..3]);
    taker.credit(0).await;
    taker.ack(&made[..3]).await;
    assert!(taker.quiet().await.is_empty(), "lowered to nothing");
    taker.credit(1).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[3..4], "one that is larger than the window, alone");
    taker.credit(u64::MAX).await;
    assert_eq!(unit_ids(&taker.quiet().await), made[4..]);
}

#[tokio::test]
async fn whatever_is_acknowledged_when_the_window_holds() {
    let service = TestService::start().await;
    let mut worker = service.worker().await;
    for seed in 0..8 {
        let mut dice = Dice::new(seed);
        let run = format!("run-{seed}");
        let credit = 50 + dice.below(200);
        let mut taker =
            Taker::join(&service, v1::Subscription { credit_tokens: credit, ..subscription(&run, "trainers") }).await;
        let (mut out, mut reported, mut done) = (BTreeMap::new(), 0_u64, 0);
        while done < 40 {
            if reported < 40 && dice.below(2) == 0 {
                let tokens = 2 + u32::try_from(dice.below(120)).unwrap();
                row(&mut worker, &run, &reported.to_string(), tokens).await;
                reported += 1;
            }
            for unit in taker.quiet().await {
                out.insert(unit.unit_id, unit.tokens);
            }
            let sum: u64 = out.values().sum();
            assert!(sum <= credit || out.len() == 1, "seed {seed}: {sum} of {credit} out in {} units", out.len());
            let picked = out.keys().nth(usize::try_from(dice.below(4)).unwrap()).cloned();
            if let Some(unit) = picked {
                out.remove(&unit);
                taker.ack(&[unit]).await;
                done += 1;
            }
        }
    }
}
