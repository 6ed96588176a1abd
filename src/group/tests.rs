//! Groups: who may join, when they are released, and with whom.

#![expect(clippy::float_cmp, clippy::unwrap_used, reason = "these numbers are exact, and a test fails by panicking")]

use super::*;

fn rollout(text: &str) -> RolloutId {
    RolloutId::parse(text).unwrap()
}

#[test]
fn a_group_has_one_size_and_no_more_members_than_that() {
    let id = GroupId::parse("g").unwrap();
    let mut group = Group::default();
    group.opened(&rollout("a"), 0);
    group.opened(&rollout("b"), 0);
    group.said_size(2);
    assert_eq!(group.judge(&id, &rollout("a"), Some(2)), Ok(()));
    assert_eq!(group.judge(&id, &rollout("a"), Some(3)).unwrap_err().reason, Reason::GroupSizeConflict);
    assert_eq!(group.judge(&id, &rollout("c"), None).unwrap_err().reason, Reason::GroupFull);
    group.closed(&rollout("a"), 0, Member::WillRetry);
    group.closed(&rollout("b"), 0, Member::Finalised);
    assert!(!group.is_over());
    assert_eq!(group.judge(&id, &rollout("a"), None), Ok(()));
    group.opened(&rollout("a"), 1);
    group.opened(&rollout("a"), 1);
    assert!(!group.is_over(), "opened twice is opened once");
    assert_eq!(group.members_after(Some(&rollout("a"))).collect::<Vec<_>>(), [&rollout("b")]);
    group.closed(&rollout("a"), 0, Member::Out);
    assert!(!group.is_over(), "the end of an older attempt may be known late");
    group.closed(&rollout("a"), 1, Member::Out);
    assert!(group.is_over());
    assert!(!group.forgotten(&rollout("a"), 0), "an older attempt's tombstone says nothing");
    assert!(!group.forgotten(&rollout("a"), 1) && !group.forgotten(&rollout("a"), 1));
    group.opened(&rollout("a"), 0);
    assert!(!group.forgotten(&rollout("b"), 0), "one was opened again");
    assert!(group.forgotten(&rollout("a"), 0));
}

#[test]
fn a_size_that_its_members_exceed_already_is_refused() {
    let id = GroupId::parse("g").unwrap();
    let mut group = Group::default();
    group.opened(&rollout("a"), 0);
    group.opened(&rollout("b"), 0);
    assert_eq!(group.judge(&id, &rollout("a"), Some(1)).unwrap_err().reason, Reason::GroupFull);
}

fn rules(estimator: Estimator) -> GroupRules {
    GroupRules { estimator, ..GroupRules::default() }
}

/// A group of this size with these finalised members.
fn finalised(rules: GroupRules, size: Option<u32>, rewards: &[(&str, f64)]) -> Group {
    let mut group = Group::new(rules);
    size.into_iter().for_each(|size| group.said_size(size));
    for (id, reward) in rewards {
        group.opened(&rollout(id), 0);
        group.finalised(&rollout(id), 0, *reward);
    }
    group
}

fn release(group: &Group, released_for: ReleasedFor) -> Arc<Release> {
    Release::of(group.decide(released_for, |_, attempt| format!("ended {attempt}")))
}

fn counted(release: &Release) -> Vec<(&str, u32, Option<f64>)> {
    let of = |counted: &'_ Counted| release.advantage(&counted.rollout);
    release.decided().counted.iter().map(|one| (one.rollout.as_str(), one.attempt, of(one))).collect()
}

fn absences(release: &Release) -> Vec<(Option<&str>, &str)> {
    let absences = release.decided().absences.iter();
    absences.map(|one| (one.member.as_ref().map(|(rollout, _)| rollout.as_str()), one.reason.as_str())).collect()
}

#[test]
fn a_group_is_whole_when_all_its_places_are_finalised_or_out_for_good() {
    let mut group = finalised(rules(Estimator::Mean), Some(3), &[("b", 2.0), ("a", 0.0)]);
    assert_eq!(group.due(false), None, "a place was never taken");
    group.opened(&rollout("c"), 0);
    assert_eq!(group.due(false), None, "a member is open");
    group.closed(&rollout("c"), 0, Member::WillRetry);
    assert_eq!(group.due(false), None, "another attempt is to come");
    group.opened(&rollout("c"), 1);
    group.closed(&rollout("c"), 1, Member::Out);
    assert_eq!(group.due(false), Some(ReleasedFor::Whole));
    let whole = release(&group, ReleasedFor::Whole);
    assert_eq!(counted(&whole), [("a", 0, Some(-1.0)), ("b", 0, Some(1.0))], "in the order of ids");
    assert_eq!((absences(&whole), whole.decided().absent), (vec![(Some("c"), "ended 1")], 1));
    assert!(group.released(&whole) && group.is_over() && !group.awaits_release());
    assert!(!group.released(&release(&group, ReleasedFor::Timeout)), "the first release stands");
    assert_eq!(group.due(true), None);
    assert_eq!(group.judge_released(&GroupId::parse("g").unwrap()).unwrap_err().reason, Reason::GroupReleased);
}

#[test]
fn without_a_size_a_group_is_never_whole() {
    let mut group = finalised(rules(Estimator::Mean), None, &[("a", 0.0), ("b", 1.0)]);
    assert_eq!(group.due(false), None, "more may come");
    assert_eq!(group.due(true), Some(ReleasedFor::Timeout));
    group.said_size(2);
    assert_eq!(group.due(false), Some(ReleasedFor::Whole), "now it is said");
    let nobody_asks = finalised(GroupRules::default(), Some(1), &[("a", 0.0)]);
    assert_eq!(nobody_asks.due(true), None);
    assert!(nobody_asks.is_over());
}

#[test]
fn a_quorum_or_the_time_releases_a_group_and_says_who_is_missing() {
    let mut group =
        finalised(GroupRules { quorum: Some(2), ..rules(Estimator::Mean) }, Some(5), &[("a", 1.0), ("b", 3.0)]);
    group.opened(&rollout("c"), 0);
    group.opened(&rollout("d"), 2);
    group.closed(&rollout("d"), 2, Member::WillRetry);
    assert_eq!(group.due(false), Some(ReleasedFor::Quorum));
    let early = release(&group, ReleasedFor::Quorum);
    let missing = [(Some("c"), "not_finalised"), (Some("d"), "ended 2"), (None, "never_came")];
    assert_eq!((absences(&early), early.decided().absent), (missing.to_vec(), 3));
    assert_eq!((early.dropped(), early.is_degenerate()), (None, false));
    assert_eq!(early.statistics().mean, 2.0);
    assert!(early.counts(&rollout("a"), 0) && !early.counts(&rollout("a"), 1) && !early.counts(&rollout("c"), 0));
    assert_eq!(early.advantage(&rollout("c")), None);
}

#[test]
fn an_attempt_that_comes_again_counts_and_the_older_does_not() {
    let mut group = finalised(rules(Estimator::Mean), Some(2), &[("a", 5.0), ("b", 1.0)]);
    group.opened(&rollout("a"), 1);
    group.finalised(&rollout("a"), 0, 7.0);
    assert_eq!(group.due(false), None, "the end of an older attempt may be known late");
    group.finalised(&rollout("a"), 1, 3.0);
    let whole = release(&group, ReleasedFor::Whole);
    assert_eq!(counted(&whole), [("a", 1, Some(1.0)), ("b", 0, Some(-1.0))]);
}

#[test]
fn a_group_of_one_has_nothing_to_be_compared_with() {
    let group = finalised(GroupRules { drop_zero_variance: true, ..rules(Estimator::Grpo) }, Some(1), &[("a", 5.0)]);
    let alone = release(&group, ReleasedFor::Whole);
    assert_eq!((counted(&alone), alone.is_degenerate(), alone.dropped()), (vec![("a", 0, Some(0.0))], true, None));
    for size in [Some(2), None] {
        let rest = release(&finalised(rules(Estimator::Mean), size, &[("a", 5.0)]), ReleasedFor::Timeout);
        assert_eq!((rest.dropped(), rest.is_degenerate()), (Some(DroppedFor::TooFewMembers), false));
    }
    for size in [Some(1), Some(4), None] {
        let nobody = release(&finalised(rules(Estimator::Mean), size, &[]), ReleasedFor::Timeout);
        assert_eq!(nobody.dropped(), Some(DroppedFor::TooFewMembers));
    }
}

#[test]
fn a_group_is_dropped_whose_rewards_are_equal_if_its_run_says_so_or_too_large() {
    let equal = [("a", 0.5), ("b", 0.5)];
    let kept = release(&finalised(rules(Estimator::Grpo), Some(2), &equal), ReleasedFor::Whole);
    assert_eq!((kept.dropped(), kept.advantage(&rollout("a"))), (None, Some(0.0)));
    let drops = GroupRules { drop_zero_variance: true, ..rules(Estimator::Grpo) };
    let dropped = release(&finalised(drops, Some(2), &equal), ReleasedFor::Whole);
    assert_eq!(dropped.dropped(), Some(DroppedFor::ZeroVariance));
    let differ = release(&finalised(drops, Some(2), &[("a", 0.5), ("b", 0.25)]), ReleasedFor::Whole);
    assert_eq!(differ.dropped(), None);
    let large = finalised(rules(Estimator::Mean), Some(2), &[("a", f64::MAX), ("b", f64::MAX)]);
    assert_eq!(release(&large, ReleasedFor::Whole).dropped(), Some(DroppedFor::AdvantageNotFinite));
}

#[test]
fn whole_groups_without_an_estimator_have_no_advantages() {
    let rules = GroupRules { has_group_units: true, ..GroupRules::default() };
    assert!(rules.are_released() && !rules.hold_all() && !GroupRules::default().are_released());
    let group = finalised(rules, Some(2), &[("a", 0.5), ("b", 0.5)]);
    assert_eq!(group.due(false), Some(ReleasedFor::Whole));
    let whole = release(&group, ReleasedFor::Whole);
    assert_eq!((counted(&whole), whole.dropped()), (vec![("a", 0, None), ("b", 0, None)], None));
}
