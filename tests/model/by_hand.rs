//! Small rollouts whose right answer was worked out by hand from the rules: both the model and the forest must give it.

use std::collections::BTreeMap;

use crate::case::{AgentsWithoutList, Answer, BrokenLink, Call, Case, Link, OnBrokenLink, Refusal, SharedCallOwner};
use crate::feed::{self, Form, Mention};
use crate::{invariants, reference};

/// A call of `agent` by `main`; its link is inferred, and its log-probabilities are its generated ids, negated.
fn call(id: &str, agent: &str, sequence: u64, prompt: &[u32], generation: &[u32]) -> Call {
    Call {
        id: id.to_owned(),
        agent: agent.to_owned(),
        parent_agent: None,
        sequence,
        prompt: prompt.to_vec(),
        generation: generation.to_vec(),
        logprobs: generation.iter().map(|id| -f32::from(u16::try_from(*id).unwrap())).collect(),
        link: Link::Infer,
        train: true,
        policy: "main".to_owned(),
    }
}

fn names(named: &str, mut call: Call) -> Call {
    call.link = Link::Parent(named.to_owned());
    call
}

fn below(parent_agent: &str, mut call: Call) -> Call {
    call.parent_agent = Some(parent_agent.to_owned());
    call
}

fn frozen(mut call: Call) -> Call {
    call.train = false;
    call
}

fn by(policy: &str, mut call: Call) -> Call {
    call.policy = policy.to_owned();
    call
}

fn case(calls: impl Into<Vec<Call>>) -> Case {
    Case { calls: calls.into(), ..Case::default() }
}

fn keeping(lists: &[(&str, &[&str])], mut case: Case) -> Case {
    let owned = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect();
    let lists = lists.iter().map(|(agent, ids)| ((*agent).to_owned(), owned(ids)));
    case.kept = Some(lists.collect::<BTreeMap<_, _>>());
    case
}

/// The answer, on which the model and the forest agree, told forwards and backwards.
fn answer(case: &Case) -> Answer {
    let expected = reference::answer(case).unwrap();
    let forwards: Vec<Mention> = (0..case.calls.len()).map(|call| Mention { call, form: Form::Full }).collect();
    let backwards: Vec<Mention> = forwards.iter().rev().cloned().collect();
    for mentions in [forwards, backwards] {
        let mut told = feed::tell(case, &mentions).unwrap();
        let heard = feed::hear(&mut told.forest, case, &expected);
        assert_eq!(heard.answer, expected);
        invariants::check(case, &heard.answer, &invariants::ledgers(&heard.plans)).unwrap();
    }
    expected
}

/// Each row as `walk | trains`, both in order, ids one character each.
fn rows(answer: &Answer) -> Vec<String> {
    answer.rows.iter().map(|row| format!("{} | {}", row.walk.concat(), row.trains.concat())).collect()
}

/// The links as `child<parent`, roots as `child`.
fn links(answer: &Answer) -> String {
    let link = |(child, parent): (&String, &Option<String>)| match parent {
        Some(parent) => format!("{child}<{parent}"),
        None => child.clone(),
    };
    answer.parents.iter().map(link).collect::<Vec<_>>().join(" ")
}

fn broken(named: &str, first_difference: Option<usize>) -> BrokenLink {
    BrokenLink { named: named.to_owned(), first_difference }
}

/// A leader works, forks two scouts off its history, one of which forks again; the leader compacts and goes on; one turn
/// is tried twice, and a frozen judge looks at the end.
fn expedition() -> Case {
    case([
        call("a", "lead", 1, &[1, 2], &[3]),
        call("b", "lead", 2, &[1, 2, 3, 4], &[5]),
        below("lead", call("c", "east", 3, &[1, 2, 3, 4, 5, 20], &[21])),
        below("lead", call("d", "west", 4, &[1, 2, 3, 4, 5, 30], &[31])),
        below("lead", call("e", "west", 5, &[1, 2, 3, 4, 5, 30, 31, 32], &[33])),
        below("west", call("f", "peak", 6, &[1, 2, 3, 4, 5, 30, 31, 40], &[41])),
        below("west", call("g", "peak", 7, &[1, 2, 3, 4, 5, 30, 31, 40, 41, 42], &[43])),
        call("h", "lead", 8, &[1, 2, 3, 4, 5, 6], &[7]),
        call("i", "lead", 9, &[1, 2, 3, 4, 5, 6], &[8]),
        call("j", "lead", 10, &[1, 2, 3, 4, 5, 6, 8, 9], &[50]),
        call("k", "lead", 11, &[1, 50], &[51]),
        frozen(call("l", "judge", 12, &[1, 50, 51, 60], &[61])),
    ])
}

#[test]
fn twelve_calls_of_a_leader_its_scouts_and_a_judge() {
    let answer = answer(&expedition());
    assert_eq!(links(&answer), "a b<a c<b d<b e<d f<d g<f h<b i<b j<i k l<k");
    // a and b go to the leader's last line; d to its own agent's leaf only if no leaf below is the leader's: e, not g.
    assert_eq!(rows(&answer), ["abc | c", "abde | de", "abdfg | fg", "abh | h", "abij | abij", "k | k"]);
    let row = &answer.rows[4];
    assert_eq!(row.token_ids, [1, 2, 3, 4, 5, 6, 8, 9, 50]);
    assert_eq!(row.loss_mask, [0, 0, 1, 0, 1, 0, 1, 0, 1]);
    assert_eq!(row.logprobs, [0.0, 0.0, -3.0, 0.0, -5.0, 0.0, -8.0, 0.0, -50.0]);
}

#[test]
fn the_first_leaf_may_own_what_is_shared() {
    let mut case = expedition();
    case.settings.shared_call_owner = SharedCallOwner::FirstLeaf;
    let rows = rows(&answer(&case));
    assert_eq!(rows, ["abc | abc", "abde | de", "abdfg | fg", "abh | h", "abij | ij", "k | k"]);
}

#[test]
fn a_retry_that_nobody_kept_is_in_no_row() {
    let others = ["a", "b", "i", "j", "k"];
    let kept = keeping(&[("lead", &others), ("west", &["d", "e"])], expedition());
    assert_eq!(rows(&answer(&kept)), ["abde | de", "abij | abij", "k | k"]);
}

#[test]
fn a_compaction_begins_a_new_tree_and_its_summary_ends_the_old_one() {
    let turns = [
        call("a", "m", 1, &[1], &[2]),
        call("s", "m", 2, &[1, 2, 9], &[7, 7]),
        call("b", "m", 3, &[1, 7, 7], &[3]),
        call("c", "m", 4, &[1, 7, 7, 3, 4], &[5]),
    ];
    assert_eq!(rows(&answer(&case(turns))), ["as | as", "bc | bc"]);
}

#[test]
fn a_summary_that_does_not_train_leaves_the_line_before_it_as_a_leaf() {
    let turns =
        [call("a", "m", 1, &[1], &[2]), frozen(call("s", "m", 2, &[1, 2, 9], &[7])), call("b", "m", 3, &[1, 7], &[3])];
    assert_eq!(rows(&answer(&case(turns))), ["a | a", "b | b"]);
}

#[test]
fn a_rewind_forks_and_the_line_that_goes_on_owns_what_they_share() {
    let turns = [
        call("a", "m", 1, &[1], &[2]),
        call("b", "m", 2, &[1, 2, 3], &[4]),
        call("c", "m", 3, &[1, 2, 3, 4, 5], &[6]),
        call("d", "m", 4, &[1, 2, 3, 9], &[8]),
    ];
    let answer = answer(&case(turns));
    assert_eq!(links(&answer), "a b<a c<b d<a");
    assert_eq!(rows(&answer), ["abc | bc", "ad | ad"]);
}

#[test]
fn forks_of_forks_each_own_what_only_they_continue() {
    let turns = [
        call("a", "one", 1, &[1], &[2]),
        below("one", call("b", "two", 2, &[1, 2, 3], &[4])),
        below("two", call("c", "six", 3, &[1, 2, 3, 4, 5], &[6])),
        below("two", call("d", "two", 4, &[1, 2, 3, 4, 7], &[8])),
    ];
    // No leaf is of the root's agent: a goes to the last leaf, b to its own agent's.
    assert_eq!(rows(&answer(&case(turns))), ["abc | c", "abd | abd"]);
}

#[test]
fn no_leaf_of_root_or_own_agent_leaves_it_to_the_last_leaf() {
    let turns =
        [call("a", "one", 1, &[1], &[2]), call("b", "two", 3, &[1, 2, 3], &[4]), call("c", "six", 2, &[1, 2, 5], &[6])];
    assert_eq!(rows(&answer(&case(turns))), ["ac | c", "ab | ab"]);
}

#[test]
fn the_root_counts_even_where_it_does_not_train() {
    let turns = [
        frozen(call("a", "one", 1, &[1], &[2])),
        call("b", "two", 2, &[1, 2, 3], &[4]),
        call("c", "one", 3, &[1, 2, 3, 4, 5], &[6]),
        call("d", "two", 4, &[1, 2, 3, 4, 7], &[8]),
    ];
    assert_eq!(rows(&answer(&case(turns))), ["abc | bc", "abd | d"]);
}

#[test]
fn twins_are_chosen_by_agent_upwards_then_by_order() {
    let turns = |of: &str, sequence| {
        case([
            call("p", "top", 2, &[1], &[2]),
            call("q", "top", 5, &[1], &[2]),
            below("top", call("r", "mid", 3, &[1], &[2])),
            below("mid", call("u", "low", 1, &[9], &[9])),
            below(if of == "low" { "mid" } else { "top" }, call("x", of, sequence, &[1, 2, 3], &[4])),
        ])
    };
    let parent = |of, sequence| answer(&turns(of, sequence)).parents["x"].clone().unwrap();
    assert_eq!(parent("low", 9), "r", "the parent agent's, though the grandparent's is later");
    assert_eq!(parent("mid", 9), "r", "its own agent's");
    assert_eq!(parent("new", 9), "q", "of the parent agent's two the latest before it");
    assert_eq!(parent("new", 4), "p", "of the parent agent's two the latest before it");
    assert_eq!(parent("new", 1), "p", "none is before it: the earliest");
}

#[test]
fn agents_that_are_each_others_parents_end_the_search() {
    let turns = [
        call("p", "far", 1, &[1], &[2]),
        call("q", "far", 2, &[1], &[2]),
        below("pong", call("x", "ping", 3, &[1, 2], &[4])),
        below("ping", call("y", "pong", 4, &[1, 2], &[5])),
    ];
    assert_eq!(links(&answer(&case(turns))), "p q x<q y<q");
}

#[test]
fn equal_sequences_are_ordered_by_id() {
    let turns = [call("z", "m", 7, &[1], &[2]), call("y", "m", 7, &[1], &[2]), call("x", "m", 7, &[1, 2], &[3])];
    let answer = answer(&case(turns));
    assert_eq!(links(&answer), "x<y y z");
    assert_eq!(rows(&answer), ["yx | yx", "z | z"]);
}

#[test]
fn a_link_to_itself_or_to_what_never_came_is_broken_and_inferred() {
    let turns = [
        call("a", "m", 1, &[1], &[2]),
        names("b", call("b", "m", 2, &[1, 2], &[3])),
        names("?", call("c", "m", 3, &[1, 2, 3], &[4])),
    ];
    let answer = answer(&case(turns));
    assert_eq!(links(&answer), "a b<a c<b");
    assert_eq!(answer.broken_links["b"], broken("b", None));
    assert_eq!(answer.broken_links["c"], broken("?", None));
}

#[test]
fn a_named_parent_that_does_not_fit_is_shown_with_the_first_difference() {
    let turns = [
        call("a", "m", 1, &[1, 2], &[3, 4]),
        names("a", call("b", "m", 2, &[1, 2, 3, 9], &[5])),
        names("a", call("c", "m", 3, &[1, 2, 3], &[5])),
    ];
    let mut case = case(turns);
    let answer = answer(&case);
    assert_eq!(links(&answer), "a b c");
    assert_eq!(answer.broken_links["b"], broken("a", Some(3)));
    assert_eq!(answer.broken_links["c"], broken("a", Some(3)), "the prompt ends inside the parent's text");
    case.settings.on_broken_link = OnBrokenLink::Discard;
    assert_eq!(reference::answer(&case), Err(Refusal::BrokenLink));
}

#[test]
fn a_link_climbs_past_what_was_not_kept() {
    let turns = case([
        call("a", "m", 1, &[1], &[2]),
        call("t", "m", 2, &[1], &[2]),
        names("a", call("b", "m", 3, &[1, 2, 3], &[4])),
        names("b", call("c", "m", 4, &[1, 2, 3, 4], &[5])),
    ]);
    let without_b = keeping(&[("m", &["a", "t", "c"])], turns.clone());
    assert_eq!(links(&answer(&without_b)), "a c<a t", "by b's own link, not by the later twin");
    let without_both = keeping(&[("m", &["t", "c"])], turns);
    assert_eq!(links(&answer(&without_both)), "c t", "a is a root for its prompt continues nothing");
}

#[test]
fn a_climb_goes_round_only_through_calls_that_sampled_nothing() {
    let turns = [
        call("a", "m", 1, &[1], &[2]),
        names("v", call("u", "m", 2, &[1, 2], &[])),
        names("w", call("v", "m", 3, &[1, 2], &[])),
        names("u", call("w", "m", 4, &[1, 2], &[])),
        names("v", call("b", "m", 5, &[1, 2, 3], &[4])),
    ];
    let answer = answer(&case(turns));
    assert_eq!(links(&answer), "a b<a");
    assert_eq!(answer.broken_links["b"], broken("v", None));
}

#[test]
fn a_root_by_its_own_word_continues_nothing() {
    let mut fork = call("b", "m", 2, &[1, 2, 3], &[4]);
    fork.link = Link::Root;
    assert_eq!(rows(&answer(&case([call("a", "m", 1, &[1], &[2]), fork]))), ["a | a", "b | b"]);
}

#[test]
fn an_empty_prompt_is_a_root_and_a_prompt_may_equal_its_parent() {
    let turns = [call("a", "m", 1, &[], &[1]), call("b", "m", 2, &[1], &[2]), call("c", "m", 3, &[1, 2], &[3])];
    let answer = answer(&case(turns));
    assert_eq!(rows(&answer), ["abc | abc"]);
    assert_eq!(answer.rows[0].loss_mask, [1, 1, 1]);
}

#[test]
fn what_sampled_nothing_or_never_trains_gives_no_row() {
    assert_eq!(rows(&answer(&case([call("a", "m", 1, &[1], &[])]))), Vec::<String>::new());
    assert_eq!(rows(&answer(&case([frozen(call("a", "m", 1, &[1], &[2]))]))), Vec::<String>::new());
}

#[test]
fn each_policy_trains_its_own_and_takes_the_rest_as_context() {
    let turns = [
        by("big", call("a", "m", 1, &[1], &[2])),
        by("tiny", call("b", "m", 2, &[1, 2, 3], &[4])),
        by("big", call("c", "m", 3, &[1, 2, 3, 4, 5], &[6])),
    ];
    let mut case = case(turns);
    assert_eq!(rows(&answer(&case)), ["abc | ac", "ab | b"]);
    case.settings.policy = Some("tiny".to_owned());
    assert_eq!(rows(&answer(&case)), ["ab | b"]);
}

#[test]
fn too_long_a_call_leaves_the_one_before_it_as_the_leaf() {
    let mut case = case([call("a", "m", 1, &[1], &[2]), call("b", "m", 2, &[1, 2, 3], &[4])]);
    case.settings.max_row_tokens = Some(4);
    assert_eq!(rows(&answer(&case)), ["ab | ab"]);
    case.settings.max_row_tokens = Some(3);
    assert_eq!(rows(&answer(&case)), ["a | a"]);
}

#[test]
fn an_agent_without_a_list_keeps_nothing_or_everything() {
    let turns = case([call("a", "one", 1, &[1], &[2]), call("b", "two", 2, &[1, 2], &[3])]);
    let mut one_list = keeping(&[("one", &["a"])], turns.clone());
    assert_eq!(rows(&answer(&one_list)), ["a | a"]);
    one_list.settings.agents_without_list = AgentsWithoutList::Keep;
    assert_eq!(rows(&answer(&one_list)), ["ab | ab"]);
    let missing = keeping(&[("one", &["a", "?"])], turns);
    assert_eq!(reference::answer(&missing), Err(Refusal::MissingCall));
}

#[test]
fn a_fork_inside_a_block_and_one_at_its_edge() {
    let text: Vec<u32> = (1..200).collect();
    let turns = [
        call("a", "m", 1, &text[..100], &text[100..128]),
        call("b", "m", 2, &text[..128], &[7]),
        call("c", "m", 3, &[&text[..128], &[8, 8]].concat(), &[9]),
        call("d", "m", 4, &text[..127], &[6]),
    ];
    let answer = answer(&case(turns));
    assert_eq!(links(&answer), "a b<a c<a d");
    assert_eq!(rows(&answer), ["ab | b", "ac | ac", "d | d"]);
}
