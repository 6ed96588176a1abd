//! Whether the service takes work. What failed stays failed, what drains does not come back, and what
//! takes work does not go back to "not yet".

use tokio::sync::watch;

/// Whether the service takes work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ready {
    /// Not yet, and why.
    NotYet(String),
    /// It does.
    Yes,
    /// It is about to stop.
    Draining,
    /// It cannot go on, and why.
    Failed(String),
}

impl Ready {
    /// Why it takes no work; `None` if it does.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        match self {
            Self::Yes => None,
            Self::Draining => Some("draining"),
            Self::NotYet(reason) | Self::Failed(reason) => Some(reason),
        }
    }
}

/// The one place that knows whether the service takes work. Others read it, or follow it.
#[derive(Debug)]
pub struct Readiness(watch::Sender<Ready>);

impl Readiness {
    /// Not ready yet, for this reason.
    #[must_use]
    pub fn starting(reason: impl Into<String>) -> Self {
        Self(watch::Sender::new(Ready::NotYet(reason.into())))
    }

    /// How it stands now.
    #[must_use]
    pub fn now(&self) -> Ready {
        self.0.borrow().clone()
    }

    /// Whether it takes work now.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        *self.0.borrow() == Ready::Yes
    }

    /// To hear of each change.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Ready> {
        self.0.subscribe()
    }

    /// It takes no work yet, for this reason. Nothing, once it takes work: who says how a beginning goes on may be late.
    pub fn not_yet(&self, reason: impl Into<String>) {
        let next = Ready::NotYet(reason.into());
        self.0.send_if_modified(|state| match state {
            Ready::NotYet(_) if *state != next => {
                *state = next;
                true
            }
            Ready::NotYet(_) | Ready::Yes | Ready::Draining | Ready::Failed(_) => false,
        });
    }

    /// It takes work. Nothing, once it drains or has failed.
    pub fn ready(&self) {
        self.become_if_up(Ready::Yes);
    }

    /// It is about to stop. Nothing, once it has failed.
    pub fn draining(&self) {
        self.become_if_up(Ready::Draining);
    }

    /// It cannot go on. The first reason stands.
    pub fn failed(&self, reason: impl Into<String>) {
        let reason = reason.into();
        self.0.send_if_modified(|state| {
            let first = !matches!(state, Ready::Failed(_));
            if first {
                *state = Ready::Failed(reason);
            }
            first
        });
    }

    fn become_if_up(&self, next: Ready) {
        self.0.send_if_modified(|state| match state {
            Ready::NotYet(_) | Ready::Yes if *state != next => {
                *state = next;
                true
            }
            Ready::NotYet(_) | Ready::Yes | Ready::Draining | Ready::Failed(_) => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_drains_or_failed_does_not_come_back() {
        let readiness = Readiness::starting("replaying the log");
        assert_eq!(readiness.now().why_not(), Some("replaying the log"));
        readiness.not_yet("replaying the rest");
        assert_eq!(readiness.now().why_not(), Some("replaying the rest"));
        readiness.ready();
        assert!(readiness.is_ready());
        // Who says how far the log is read may be a moment late.
        readiness.not_yet("replaying the last record");
        assert!(readiness.is_ready());
        readiness.draining();
        readiness.ready();
        assert_eq!(readiness.now(), Ready::Draining);
        readiness.failed("the disk is gone");
        readiness.failed("and more");
        readiness.draining();
        assert_eq!(readiness.now(), Ready::Failed("the disk is gone".to_owned()));
    }
}
