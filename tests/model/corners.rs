//! That the generator reaches the corners for which the model is there: a property over tame forests proves little.

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;

use crate::case::{Answer, Case, Link};
use crate::feed::Form;
use crate::generator::{NEVER_COMES, Story, stories};
use crate::reference;

type Corner = (&'static str, fn(&Story, &Answer) -> bool);

const CORNERS: [Corner; 16] = [
    ("several rows", |_, answer| answer.rows.len() > 3),
    ("no rows", |_, answer| answer.rows.is_empty()),
    ("a walk of four", |_, answer| answer.rows.iter().any(|row| row.walk.len() >= 4)),
    ("a call that two rows hold", |_, answer| answer.rows.iter().any(|row| row.trains.len() < row.walk.len())),
    ("rows of several policies", |_, answer| answer.rows.chunk_by(|one, other| one.policy == other.policy).count() > 1),
    ("a text over two blocks", |_, answer| answer.rows.iter().any(|row| row.token_ids.len() > 128)),
    ("an edge inside a row on a block's edge", |_, answer| answer.rows.iter().any(|row| row.token_ids.len() % 64 == 0)),
    ("a link that does not fit", |_, answer| broken(answer, |_, first_difference| first_difference.is_some())),
    ("a link to what never came", |_, answer| broken(answer, |named, _| named == NEVER_COMES)),
    ("a link to itself", |_, answer| answer.broken_links.iter().any(|(id, broken)| *id == broken.named)),
    ("a circle", |story, answer| {
        answer.broken_links.iter().any(|(id, link)| {
            let came = story.case.calls.iter().any(|call| call.id == link.named);
            came && *id != link.named && link.first_difference.is_none()
        })
    }),
    ("a climb past an unkept call", |story, answer| climbs(&story.case, answer)),
    ("twins to choose from", |story, answer| twins_of_two_agents(&story.case, answer)),
    ("an empty prompt", |story, _| story.case.calls.iter().any(|call| call.prompt.is_empty())),
    ("a call too long to train", |story, answer| {
        let limit = story.case.settings.max_row_tokens.unwrap_or(usize::MAX);
        story.case.calls.iter().any(|call| answer.parents.contains_key(&call.id) && call.full().len() > limit)
    }),
    ("a delta", |story, _| story.tellings[0].iter().any(|mention| mention.form != Form::Full)),
];

fn broken(answer: &Answer, is: impl Fn(&str, Option<usize>) -> bool) -> bool {
    answer.broken_links.values().any(|link| is(&link.named, link.first_difference))
}

fn climbs(case: &Case, answer: &Answer) -> bool {
    case.calls.iter().any(|call| match (&call.link, answer.parents.get(&call.id)) {
        (Link::Parent(named), Some(Some(parent))) => named != parent && !answer.broken_links.contains_key(&call.id),
        _ => false,
    })
}

fn twins_of_two_agents(case: &Case, answer: &Answer) -> bool {
    answer.parents.values().flatten().any(|id| {
        let parent = case.calls.iter().find(|call| call.id == *id);
        let twin = |call: &crate::case::Call| {
            answer.parents.contains_key(&call.id)
                && parent.is_some_and(|parent| parent.agent != call.agent && parent.full() == call.full())
        };
        case.calls.iter().any(twin)
    })
}

#[test]
fn the_generator_reaches_every_corner() {
    let mut runner = TestRunner::deterministic();
    let mut reached = [0; CORNERS.len()];
    for _ in 0..1500 {
        let story = stories().new_tree(&mut runner).unwrap().current();
        let answer = reference::answer(&story.case).unwrap();
        for (count, (_, is_there)) in reached.iter_mut().zip(&CORNERS) {
            *count += usize::from(is_there(&story, &answer));
        }
    }
    let counts: Vec<(&str, usize)> = CORNERS.iter().map(|(corner, _)| *corner).zip(reached).collect();
    assert!(counts.iter().all(|(_, count)| *count >= 5), "of 1500 forests: {counts:#?}");
}
