//! How the rewards of a group become advantages (RULES section 5).
//!
//! What is counted are rollouts, once each, in the order of their ids: so that sums come out the same, bit for bit, whenever and
//! wherever they are made. How many rows a rollout has is not known here.

/// How rewards become advantages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Estimator {
    /// There are no advantages of groups.
    #[default]
    None,
    /// r − mean.
    Mean,
    /// (r − mean) / (standard deviation with n − 1, + 1e-6).
    Grpo,
    /// r − mean of the others.
    Rloo,
}

/// What keeps a standard deviation of 0 from being divided by.
const DEVIATION_ADDED: f64 = 1e-6;

/// The rewards of a group in two numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Their mean; 0 for none.
    pub mean: f64,
    /// Their standard deviation with n − 1; 0 for fewer than two.
    pub standard_deviation: f64,
}

impl Statistics {
    /// Those of these rewards.
    #[must_use]
    pub fn of(rewards: &[f64]) -> Self {
        let count = rewards.len() as f64;
        if rewards.is_empty() {
            return Self::default();
        }
        let mean = rewards.iter().sum::<f64>() / count;
        let squares: f64 = rewards.iter().map(|reward| (reward - mean) * (reward - mean)).sum();
        let standard_deviation = if rewards.len() < 2 { 0.0 } else { (squares / (count - 1.0)).sqrt() };
        Self { mean, standard_deviation }
    }
}

impl Estimator {
    /// The advantage of each of these rollouts; none without an estimator. One that is alone has 0.
    #[must_use]
    pub fn advantages(self, rewards: &[f64]) -> Option<Vec<f64>> {
        let Statistics { mean, standard_deviation } = Statistics::of(rewards);
        let others = rewards.len() as f64 - 1.0;
        let sum: f64 = rewards.iter().sum();
        let advantage = |reward: &f64| match self {
            Self::None | Self::Mean => reward - mean,
            Self::Grpo => (reward - mean) / (standard_deviation + DEVIATION_ADDED),
            Self::Rloo => reward - (sum - reward) / others,
        };
        match (self, rewards) {
            (Self::None, _) => None,
            (_, [_]) => Some(vec![0.0]),
            (_, all) => Some(all.iter().map(advantage).collect()),
        }
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    fn of(estimator: Estimator, rewards: &[f64]) -> Vec<f64> {
        estimator.advantages(rewards).unwrap()
    }

    #[test]
    fn rewards_become_advantages_as_worked_out_by_hand() {
        assert_eq!(Estimator::None.advantages(&[1.0, 2.0]), None);
        assert_eq!(of(Estimator::Mean, &[0.0, 2.0]), [-1.0, 1.0]);
        assert_eq!(of(Estimator::Rloo, &[0.0, 1.0]), [-1.0, 1.0]);
        assert_eq!(of(Estimator::Mean, &[1.0, 1.0, 1.0, 0.0]), [0.25, 0.25, 0.25, -0.75], "the baseline is 0.75");
        // The others of each 1 have (1 + 1 + 0) / 3, those of the 0 have 1.
        let third = 1.0 - 2.0 / 3.0;
        assert_eq!(of(Estimator::Rloo, &[1.0, 1.0, 1.0, 0.0]), [third, third, third, -1.0]);
        // 0 and 2: the squares are 1 and 1, so the variance is 2 / 1.
        let scaled = 1.0 / (2.0_f64.sqrt() + 1e-6);
        assert_eq!(of(Estimator::Grpo, &[0.0, 2.0]), [-scaled, scaled]);
        // 1, 1, 1, 0: 3 × 1/16 + 9/16 = 12/16, over 3, is 1/4.
        assert_eq!(of(Estimator::Grpo, &[1.0, 1.0, 1.0, 0.0]), [0.25, 0.25, 0.25, -0.75].map(|r| r / (0.5 + 1e-6)));
    }

    #[test]
    fn who_is_alone_and_who_is_like_all_others_has_nothing() {
        for estimator in [Estimator::Mean, Estimator::Grpo, Estimator::Rloo] {
            assert_eq!(of(estimator, &[7.5]), [0.0]);
            assert_eq!(of(estimator, &[0.5, 0.5, 0.5]), [0.0; 3]);
            assert!(of(estimator, &[]).is_empty());
        }
        assert_eq!(Statistics::of(&[]), Statistics { mean: 0.0, standard_deviation: 0.0 });
        assert_eq!(Statistics::of(&[7.5]), Statistics { mean: 7.5, standard_deviation: 0.0 });
    }
}
