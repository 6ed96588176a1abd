//! What counts as unread, and until when.

use std::task::Waker;

use super::*;
use crate::rpc::frames::{DATA, FRAME_HEADER_BYTES, Frames, HEADERS, PADDED, PREFACE_BYTES};

fn frame(kind: u8, payload: usize) -> Vec<u8> {
    frame_of(1, kind, 0, payload)
}

fn frame_of(stream: u8, kind: u8, flags: u8, payload: usize) -> Vec<u8> {
    let length = u32::try_from(payload).unwrap_or_default().to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, stream];
    bytes.resize(FRAME_HEADER_BYTES + payload, 7);
    bytes
}

fn of(connection: &ConnectionUnread) -> (usize, usize) {
    (connection.bytes.load(Ordering::Relaxed), connection.all.bytes.load(Ordering::Relaxed))
}

#[test]
fn data_counts_until_it_is_read_and_other_frames_until_they_are_whole() {
    let mut bytes = vec![b'P'; PREFACE_BYTES];
    bytes.extend(frame(4, 30));
    bytes.extend(frame(DATA, 70_000));
    bytes.extend(frame(DATA, 0));
    bytes.extend(frame(8, 4));
    // One byte says how many mean nothing: seven, as all of them are.
    bytes.extend(frame_of(1, DATA, PADDED, 1));
    bytes.extend(frame_of(1, DATA, PADDED, 8));
    bytes.extend(frame_of(1, DATA, PADDED, 1000));
    bytes.extend(&frame(1, 100)[..FRAME_HEADER_BYTES + 60]);
    for size in [1, 3, 8, 9, 10, 1000, bytes.len()] {
        let unread = ConnectionUnread::new(unread(1 << 20));
        let mut frames = Frames::new();
        bytes.chunks(size).for_each(|chunk| frames.follow(chunk, &unread));
        let came = 71_052 + 5 * FRAME;
        assert_eq!(of(&unread), (came, came), "in pieces of {size}");
        assert_eq!(frames.partial(), 60);
        let (one, two) = (unread.reader(), unread.reader());
        unread.begun();
        one.taken(50_000);
        let left = came - 50_000;
        assert_eq!(of(&unread), (left, left));
        drop(one);
        assert_eq!(of(&unread), (left, left), "the other may still read it");
        drop(two);
        assert_eq!(of(&unread), (0, 0));
    }
}

const FRAME: usize = limits::HTTP2_DATA_FRAME_BYTES;
const MOST: usize = 64 << 20;
const OTHERS: usize = 100;

/// What so many connections share.
fn unread(most_bytes: usize) -> Arc<Unread> {
    Arc::new(Unread::new(most_bytes, Arc::new(AtomicUsize::new(OTHERS))))
}

#[test]
fn only_who_has_sent_much_waits_and_is_woken_when_there_is_less() {
    let all = unread(MOST);
    let (much, little) = (ConnectionUnread::new(Arc::clone(&all)), ConnectionUnread::new(Arc::clone(&all)));
    much.came(MOST + 1);
    little.came(MOST / 2 / OTHERS);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let context = Context::from_waker(&waker);
    assert!(little.may_read(&context) && !much.may_read(&context) && !much.may_read(&context));
    assert_eq!(all.waiting.lock().len(), 1, "however often it asks");
    drop(little);
    assert_eq!(woken.0.load(Ordering::Relaxed), 0, "there is still too much");
    much.begun();
    much.reader().taken(1);
    assert!(woken.0.load(Ordering::Relaxed) > 0 && much.may_read(&context));
    drop(much);
    assert_eq!(all.bytes.load(Ordering::Relaxed), 0);
}

/// A request's body, into which the test puts what has come.
#[derive(Clone, Default)]
struct Sent(Arc<(Mutex<Vec<Bytes>>, AtomicWaker)>);

impl http_body::Body for Sent {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.0.1.register(context.waker());
        self.0.0.lock().pop().map_or(Poll::Pending, |data| Poll::Ready(Some(Ok(Frame::data(data)))))
    }
}

struct Stream {
    sent: Sent,
    body: Body,
    reader: Reader,
}

impl Stream {
    /// The request with this number has begun, and is read from.
    fn begin(number: u8, frames: &mut Frames, unread: &Arc<ConnectionUnread>) -> Self {
        frames.follow(&frame_of(number, HEADERS, 0, 10), unread);
        let sent = Sent::default();
        Self { body: Body::new(sent.clone()), sent, reader: unread.reader() }
    }

    fn read(&mut self) -> usize {
        let context = Context::from_waker(Waker::noop());
        match self.reader.poll_frame(&mut self.body, &context) {
            Poll::Ready(Some(Ok(frame))) => frame.data_ref().map_or(0, Bytes::len),
            Poll::Ready(_) | Poll::Pending => 0,
        }
    }
}

fn begun() -> (Frames, Arc<ConnectionUnread>) {
    let (mut frames, unread) = (Frames::new(), ConnectionUnread::new(unread(1 << 20)));
    frames.follow(&[b'P'; PREFACE_BYTES], &unread);
    (frames, unread)
}

#[test]
fn what_was_sent_to_a_request_that_is_given_up_does_not_count_beside_one_that_lives() {
    let (mut frames, unread) = begun();
    let mut lives = Stream::begin(1, &mut frames, &unread);
    assert_eq!(lives.read(), 0);
    for number in [3, 5, 7] {
        let mut gives_up = Stream::begin(number, &mut frames, &unread);
        frames.follow(&frame_of(number, DATA, PADDED, 5000), &unread);
        gives_up.sent.0.0.lock().push(vec![7; 5000 - 8].into());
        assert_eq!(of(&unread).0, 5000 - 8 + FRAME);
        gives_up.reader.drain(&mut gives_up.body);
        drop(gives_up);
        assert_eq!(of(&unread), (0, 0));
    }
}

#[test]
fn what_comes_for_a_request_that_is_over_is_forgotten_when_all_others_wait_for_more() {
    let (mut frames, unread) = begun();
    let (mut one, mut two) = (Stream::begin(1, &mut frames, &unread), Stream::begin(3, &mut frames, &unread));
    drop(Stream::begin(5, &mut frames, &unread));
    frames.follow(&frame_of(5, DATA, 0, 900), &unread);
    unread.settle(frames.partial());
    assert_eq!(of(&unread).0, 900 + FRAME, "the others may have something to read");
    frames.follow(&frame_of(3, DATA, 0, 100), &unread);
    two.sent.0.0.lock().push(vec![7; 100].into());
    assert_eq!((one.read(), two.read()), (0, 100));
    unread.settle(frames.partial());
    assert_eq!(of(&unread).0, 1000 + FRAME, "it is with one of them");
    two.reader.taken(100);
    assert_eq!(two.read(), 0);
    frames.follow(&frame_of(7, DATA, 0, 50)[..FRAME_HEADER_BYTES + 20], &unread);
    two.sent.0.1.wake();
    unread.settle(frames.partial());
    assert_eq!(of(&unread).0, 920 + 2 * FRAME, "one was woken");
    assert_eq!(two.read(), 0);
    unread.settle(frames.partial());
    assert_eq!(of(&unread), (20 + FRAME, 20 + FRAME), "but for the frame that is not whole");
    frames.follow(&[7; 30], &unread);
    frames.follow(&frame_of(9, HEADERS, 0, 0), &unread);
    unread.settle(frames.partial());
    assert_eq!(of(&unread).0, 50 + FRAME, "a request has begun and is not read from yet");
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl std::task::Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}
