//! Groups and their releases, as trainers and people are told of them.

use crate::group::{Absence, Decided, Release, ReleasedFor, Statistics};
use crate::ids::GroupId;
use crate::limits;
use crate::proto::v1;

/// Most bytes of the absences that stand in one message: more are left out, and the counts say how many there are.
const ABSENCES_BYTES_MAX: usize = limits::UNIT_MESSAGE_BYTES_MAX / 8;

/// Why a group was released.
#[must_use]
pub fn released_for(why: ReleasedFor) -> v1::GroupRelease {
    match why {
        ReleasedFor::Whole => v1::GroupRelease::Whole,
        ReleasedFor::Quorum => v1::GroupRelease::Quorum,
        ReleasedFor::Timeout => v1::GroupRelease::Timeout,
        ReleasedFor::Operator => v1::GroupRelease::Operator,
    }
}

/// A group as it was released.
#[must_use]
pub fn figures(group: &GroupId, release: &Release) -> v1::GroupFigures {
    let Decided { rules, released_for: why, size, counted, absences: missing, absent: _ } = release.decided();
    let Statistics { mean, standard_deviation } = release.statistics();
    v1::GroupFigures {
        group_id: group.to_string(),
        group_size: *size,
        counted_rollouts: u32::try_from(counted.len()).unwrap_or(u32::MAX),
        absences: absences(missing),
        release: released_for(*why).into(),
        reward_mean: mean,
        reward_standard_deviation: standard_deviation,
        degenerate: release.is_degenerate() && rules.hold_all(),
    }
}

/// Who is missing, as far as that has room.
#[must_use]
pub fn absences(absences: &[Absence]) -> Vec<v1::GroupAbsence> {
    let mut bytes = 0;
    let fits = |absence: &v1::GroupAbsence| {
        bytes += prost::Message::encoded_len(absence) + 4;
        bytes <= ABSENCES_BYTES_MAX
    };
    absences.iter().map(absence).take_while(fits).collect()
}

fn absence(Absence { member, reason }: &Absence) -> v1::GroupAbsence {
    v1::GroupAbsence {
        rollout_id: member.as_ref().map_or_else(String::new, |(rollout, _)| rollout.to_string()),
        attempt: member.as_ref().map_or(0, |(_, attempt)| *attempt),
        reason: reason.clone(),
    }
}
