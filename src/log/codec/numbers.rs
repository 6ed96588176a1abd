//! Arrays of token ids and log-probabilities: little-endian, four bytes each, every bit as it was.
//!
//! On the wire an array is a message with one field of bytes. It is a message because that is what a derived one may
//! have a hand-written one as: this writes from where the record has its numbers, and reads to where the record will have them,
//! where `bytes` would copy each array once more in both directions.

use std::borrow::Cow;

use bytemuck::Pod;
use bytes::{Buf, BufMut};
use prost::encoding::{DecodeContext, WireType};
use prost::{DecodeError, Message, encoding};

use super::Fault;

const VALUES: u32 = 1;

/// Token ids.
pub(super) type Tokens<'a> = Numbers<'a, u32>;
/// Log-probabilities.
pub(super) type Logprobs<'a> = Numbers<'a, f32>;

/// An array.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Numbers<'a, T: Pod> {
    values: Cow<'a, [T]>,
    /// The length that was read in bytes, if it was no length of an array.
    wrong_length_bytes: Option<usize>,
}

impl<'a, T: Pod> Numbers<'a, T> {
    /// This array, not copied.
    pub(super) fn of(values: &'a [T]) -> Self {
        Self { values: Cow::Borrowed(values), wrong_length_bytes: None }
    }

    /// The same, where an empty array is absent.
    pub(super) fn unless_empty(values: &'a [T]) -> Option<Self> {
        (!values.is_empty()).then(|| Self::of(values))
    }

    /// The array that stands in this field.
    pub(super) fn into_values(self, field: &'static str) -> Result<Vec<T>, Fault> {
        match self.wrong_length_bytes {
            Some(bytes) => Err(Fault::Length { field, bytes }),
            None => Ok(self.values.into_owned()),
        }
    }

    /// The array that stands in this field; an absent one is empty.
    pub(super) fn or_empty(numbers: Option<Self>, field: &'static str) -> Result<Vec<T>, Fault> {
        numbers.map_or(Ok(Vec::new()), |numbers| numbers.into_values(field))
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.values)
    }
}

impl<T: Pod> Default for Numbers<'_, T> {
    fn default() -> Self {
        Self { values: Cow::Borrowed(&[]), wrong_length_bytes: None }
    }
}

impl<T: Pod + Send + Sync> Message for Numbers<'_, T> {
    fn encode_raw(&self, buffer: &mut impl BufMut) {
        let bytes = self.bytes();
        if !bytes.is_empty() {
            encoding::encode_key(VALUES, WireType::LengthDelimited, buffer);
            encoding::encode_varint(bytes.len() as u64, buffer);
            buffer.put_slice(bytes);
        }
    }

    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buffer: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        if tag != VALUES {
            return encoding::skip_field(wire_type, tag, buffer, context);
        }
        encoding::check_wire_type(WireType::LengthDelimited, wire_type)?;
        let claimed = encoding::decode_varint(buffer)?;
        let Some(length) = usize::try_from(claimed).ok().filter(|length| *length <= buffer.remaining()) else {
            // More than there is: the error of that name, which only the library makes.
            return encoding::skip_field(WireType::ThirtyTwoBit, tag, &mut &[][..], context);
        };
        if !length.is_multiple_of(size_of::<T>()) {
            self.wrong_length_bytes = Some(length);
            buffer.advance(length);
            return Ok(());
        }
        let mut values = vec![T::zeroed(); length / size_of::<T>()];
        buffer.copy_to_slice(bytemuck::cast_slice_mut(&mut values));
        self.values = Cow::Owned(values);
        Ok(())
    }

    fn encoded_len(&self) -> usize {
        match size_of_val(&*self.values) {
            0 => 0,
            bytes => encoding::key_len(VALUES) + encoding::encoded_len_varint(bytes as u64) + bytes,
        }
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}
