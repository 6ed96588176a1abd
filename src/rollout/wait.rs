//! How long a rollout has waited for something since its seal.

/// A wait that a clock looks at once it has lasted long enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wait {
    since_ms: Option<u64>,
    /// A clock has looked and found nothing missing.
    found_nothing: bool,
}

impl Wait {
    /// A wait that begins now.
    pub(super) fn since(now_ms: u64) -> Self {
        Self { since_ms: Some(now_ms), found_nothing: false }
    }

    /// When a clock has to look; none if nobody waits, or it has looked and nothing came since.
    pub(super) fn deadline_ms(&self, timeout_ms: u64) -> Option<u64> {
        self.since_ms.filter(|_| !self.found_nothing).map(|since| since.saturating_add(timeout_ms))
    }

    /// Whether it has lasted so long.
    pub(super) fn is_over(&self, timeout_ms: u64, now_ms: u64) -> bool {
        self.deadline_ms(timeout_ms).is_some_and(|deadline| deadline <= now_ms)
    }

    /// A clock has looked and found nothing missing.
    pub(super) fn looked(&mut self, timeout_ms: u64, now_ms: u64) {
        self.found_nothing |= self.is_over(timeout_ms, now_ms);
    }

    /// Something came. If a clock has looked before, what is missing now has the whole time again.
    pub(super) fn look_again(&mut self, now_ms: u64) {
        if self.found_nothing {
            *self = Self::since(now_ms);
        }
    }
}
