//! Time, as an argument for everything inside: a monotonic clock for deadlines, the calendar for people.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::watch;
use tokio::time::Instant;

/// Where time comes from.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine; milliseconds count from here.
    Machine(Instant),
    /// A hand that moves it, in tests.
    Manual(watch::Sender<u64>),
}

impl Clock {
    /// The machine's clock.
    #[must_use]
    pub fn machine() -> Self {
        Self::Machine(Instant::now())
    }

    /// A clock that stands still until it is moved.
    #[must_use]
    pub fn manual() -> Self {
        Self::Manual(watch::Sender::new(0))
    }

    /// Moves a manual clock forward; the machine's is not moved.
    pub fn advance(&self, by: Duration) {
        if let Self::Manual(now) = self {
            now.send_modify(|now| *now += milliseconds(by));
        }
    }

    /// Milliseconds since the clock began; never runs backwards.
    #[must_use]
    pub fn now_ms(&self) -> u64 {
        match self {
            Self::Machine(start) => milliseconds(start.elapsed()),
            Self::Manual(now) => *now.borrow(),
        }
    }

    /// Microseconds since the clock began, for figures only.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        match self {
            Self::Machine(start) => u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX),
            Self::Manual(now) => now.borrow().saturating_mul(1000),
        }
    }

    /// Milliseconds since the Unix epoch, for people only.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        match self {
            Self::Machine(_) => SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, milliseconds),
            Self::Manual(now) => *now.borrow(),
        }
    }

    /// Waits until this clock shows `deadline_ms`; for ever if there is none.
    pub async fn wait_until(&self, deadline_ms: Option<u64>) {
        let Some(deadline_ms) = deadline_ms else { return std::future::pending().await };
        match self {
            Self::Machine(start) => match start.checked_add(Duration::from_millis(deadline_ms)) {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            },
            Self::Manual(now) => {
                let mut now = now.subscribe();
                if now.wait_for(|now| *now >= deadline_ms).await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        }
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
