//! The bytes of a segment: what is written, and what is taken as written.
//!
//! A segment begins with a header that stands alone on its page and is never written again. Batches follow, each at a
//! multiple of 8 bytes: a header, then frames one after another. All numbers are little-endian; each checksum is a
//! crc32c over all that follows it in its header, a frame's over its payload too. `tests/fixtures/log/` holds a segment
//! of each version.
//!
//! ```text
//! segment  "HGRWSEG\0"  crc u32  version u32     log_id u64  number u64   zeros up to 4096
//! batch    "HGRWBAT\0"  crc u32  body_bytes u32  log_id u64  segment u64  first_position u64
//!          durable_through u64  oldest_segment u64  epoch u32  frames u32
//! gap      "HGRWGAP\0", else as a batch: what its body holds is given up, and positions go on at `first_position`
//! frame    crc u32  payload_bytes u32  position u64  epoch u32  kind u8  three zeros  payload
//! ```
//!
//! Never does: trust a length, or index bytes, before a checksum says that they are ours.

/// What this build writes, and the newest that it reads.
pub(super) const VERSION: u32 = 1;
/// The page of a segment's header; batches begin after it.
pub(super) const SEGMENT_HEADER_BYTES: u64 = 4096;
/// The part of that page which is not zeros.
pub(super) const SEGMENT_HEADER_USED_BYTES: usize = 64;
pub(super) const BATCH_HEADER_BYTES: usize = 64;
pub(super) const FRAME_HEADER_BYTES: usize = 24;
/// Batches begin at multiples of it.
pub(super) const BATCH_ALIGNMENT_BYTES: u64 = 8;

const SEGMENT_MAGIC: &[u8; 8] = b"HGRWSEG\0";
const BATCH_MAGIC: &[u8; 8] = b"HGRWBAT\0";
const GAP_MAGIC: &[u8; 8] = b"HGRWGAP\0";

/// The header of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentHeader {
    pub(super) version: u32,
    /// Random, the same in all segments of a log: files of two logs are told apart, and nobody can write a payload that
    /// looks like a batch.
    pub(super) log_id: u64,
    pub(super) number: u64,
}

impl SegmentHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut fields = Vec::with_capacity(SEGMENT_HEADER_USED_BYTES);
        fields.extend_from_slice(&self.version.to_le_bytes());
        fields.extend_from_slice(&self.log_id.to_le_bytes());
        fields.extend_from_slice(&self.number.to_le_bytes());
        fields.resize(SEGMENT_HEADER_USED_BYTES - 12, 0);
        seal(SEGMENT_MAGIC, &fields)
    }

    /// The header, if these bytes begin with one. Magic and checksum are the same in every version.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (magic, mut fields) = unseal(bytes.get(..SEGMENT_HEADER_USED_BYTES)?)?;
        (magic == SEGMENT_MAGIC).then_some(())?;
        Some(Self { version: fields.u32()?, log_id: fields.u64()?, number: fields.u64()? })
    }
}

/// The header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BatchHeader {
    /// Whether it stands for something that was given up in a salvage.
    pub(super) is_gap: bool,
    /// The bytes of its frames, without what fills up to the next batch.
    pub(super) body_bytes: u32,
    pub(super) log_id: u64,
    pub(super) segment: u64,
    /// The position of its first frame; if it has none, that of the next one to come.
    pub(super) first_position: u64,
    /// What was durable for certain when it was written.
    pub(super) durable_through: u64,
    /// The oldest segment that was still wanted when it was written.
    pub(super) oldest_segment: u64,
    pub(super) epoch: u32,
    pub(super) frames: u32,
}

impl BatchHeader {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut fields = Vec::with_capacity(BATCH_HEADER_BYTES);
        fields.extend_from_slice(&self.body_bytes.to_le_bytes());
        let longs = [self.log_id, self.segment, self.first_position, self.durable_through, self.oldest_segment];
        for long in longs {
            fields.extend_from_slice(&long.to_le_bytes());
        }
        fields.extend_from_slice(&self.epoch.to_le_bytes());
        fields.extend_from_slice(&self.frames.to_le_bytes());
        seal(if self.is_gap { GAP_MAGIC } else { BATCH_MAGIC }, &fields)
    }

    /// The header, if these bytes begin with one.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..BATCH_HEADER_BYTES)?;
        // Most bytes that are looked at are none; the checksum is for those that may be.
        may_be_batch(bytes).then_some(())?;
        let (magic, mut fields) = unseal(bytes)?;
        Some(Self {
            is_gap: magic == GAP_MAGIC,
            body_bytes: fields.u32()?,
            log_id: fields.u64()?,
            segment: fields.u64()?,
            first_position: fields.u64()?,
            durable_through: fields.u64()?,
            oldest_segment: fields.u64()?,
            epoch: fields.u32()?,
            frames: fields.u32()?,
        })
    }

    /// Where the batch ends that begins at this offset, and the next one begins.
    pub(super) fn end(&self, offset: u64) -> u64 {
        (offset + BATCH_HEADER_BYTES as u64 + u64::from(self.body_bytes)).next_multiple_of(BATCH_ALIGNMENT_BYTES)
    }

    /// The position after its last frame.
    pub(super) fn next_position(&self) -> u64 {
        if self.is_gap { self.first_position } else { self.first_position.saturating_add(u64::from(self.frames)) }
    }
}

/// Whether a batch may begin with these bytes.
pub(super) fn may_be_batch(bytes: &[u8]) -> bool {
    bytes.starts_with(BATCH_MAGIC) || bytes.starts_with(GAP_MAGIC)
}

/// One frame as it stands in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FrameView<'a> {
    pub(super) position: u64,
    pub(super) epoch: u32,
    pub(super) kind: u8,
    pub(super) payload: &'a [u8],
}

impl<'a> FrameView<'a> {
    /// The frame that these bytes begin with, and what follows it; `None` if its checksum says otherwise.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let whole = bytes.get(..FRAME_HEADER_BYTES + Self::payload_bytes(bytes)?)?;
        let (checksum, checked) = whole.split_first_chunk()?;
        (crc32c::crc32c(checked) == u32::from_le_bytes(*checksum)).then_some(())?;
        Self::parse_unchecked(bytes)
    }

    /// The same of bytes whose checksum was right already.
    pub(super) fn parse_unchecked(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (header, rest) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>()?;
        let (payload, rest) = rest.split_at_checked(Self::payload_bytes(bytes)?)?;
        let mut fields = Fields(header.get(8..)?);
        let (position, epoch) = (fields.u64()?, fields.u32()?);
        Some((Self { position, epoch, kind: *fields.0.first()?, payload }, rest))
    }

    /// The length that these bytes claim for the payload of the frame that they begin with.
    pub(super) fn payload_bytes(bytes: &[u8]) -> Option<usize> {
        Some(Fields(bytes.get(4..)?).u32()? as usize)
    }

    /// Writes it after what stands there.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let mut fields = [0; FRAME_HEADER_BYTES - 4];
        let payload_bytes = u32::try_from(self.payload.len()).unwrap_or(u32::MAX);
        debug_assert!(payload_bytes < u32::MAX, "payloads have a bound");
        fields[..4].copy_from_slice(&payload_bytes.to_le_bytes());
        fields[4..12].copy_from_slice(&self.position.to_le_bytes());
        fields[12..16].copy_from_slice(&self.epoch.to_le_bytes());
        fields[16] = self.kind;
        let checksum = crc32c::crc32c_append(crc32c::crc32c(&fields), self.payload);
        into.extend_from_slice(&checksum.to_le_bytes());
        into.extend_from_slice(&fields);
        into.extend_from_slice(self.payload);
    }
}

/// Whether this is the body of the batch: its frames, all of them, and nothing else.
pub(super) fn is_body(header: &BatchHeader, body: &[u8]) -> bool {
    let mut rest = body;
    for ahead in 0..u64::from(header.frames) {
        match FrameView::parse(rest) {
            Some((frame, after))
                if frame.position == header.first_position.saturating_add(ahead) && frame.epoch == header.epoch =>
            {
                rest = after;
            }
            _ => return false,
        }
    }
    rest.is_empty()
}

/// Puts magic and checksum before the fields of a header.
fn seal(magic: &[u8; 8], fields: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(12 + fields.len());
    header.extend_from_slice(magic);
    header.extend_from_slice(&crc32c::crc32c(fields).to_le_bytes());
    header.extend_from_slice(fields);
    header
}

/// The magic and the fields of a header, if its checksum is right.
fn unseal(header: &[u8]) -> Option<(&[u8; 8], Fields<'_>)> {
    let (magic, rest) = header.split_first_chunk::<8>()?;
    let (checksum, fields) = rest.split_first_chunk()?;
    (crc32c::crc32c(fields) == u32::from_le_bytes(*checksum)).then_some((magic, Fields(fields)))
}

/// Numbers from the front of these bytes.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn u32(&mut self) -> Option<u32> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_le_bytes(*number))
    }

    fn u64(&mut self) -> Option<u64> {
        let (number, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*number))
    }
}
