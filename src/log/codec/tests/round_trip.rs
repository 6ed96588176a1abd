//! Every record comes back as it was.

use proptest::prelude::*;

use super::super::{Encoding, RECORD_KINDS, decode, encode};
use super::in_bits;
use super::samples::{call_of, later_samples, samples};
use super::strategies::record;
use crate::forest::CallRecord;
use crate::log::Record;
use crate::rollout::event::RolloutRecord;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_record_comes_back_as_it_was(record in record()) {
        let (kind, payload) = encode(&record);
        prop_assert!(RECORD_KINDS.contains(&kind));
        prop_assert_eq!(Encoding::of(&record).length_bytes(), payload.len());
        let read = decode(kind, &payload);
        prop_assert_eq!(read.as_ref().map(in_bits), Ok(in_bits(&record)));
        prop_assert_eq!(read.map(|read| encode(&read)), Ok((kind, payload)));
    }

    #[test]
    fn other_records_have_other_bytes(one in record(), other in record()) {
        prop_assert_eq!(in_bits(&one) == in_bits(&other), encode(&one) == encode(&other));
    }
}

#[test]
fn samples_come_back_as_they_were() {
    for (name, record) in samples().into_iter().chain(later_samples()) {
        let (kind, payload) = encode(&record);
        assert_eq!(decode(kind, &payload).as_ref().map(in_bits), Ok(in_bits(&record)), "{name}");
    }
}

#[test]
fn every_bit_of_a_number_that_is_none_comes_back() {
    let bits = [0x7fc0_0000_u32, 0xffc0_0000, 0x7f80_0001, 0x7fff_ffff, 0xffff_ffff, 0x7f80_0000, 0x8000_0000, 0];
    let mut record = call_of(0, bits.len());
    let Record::Rollout { record: RolloutRecord::Call(CallRecord::New(new)), .. } = &mut record else {
        panic!("it is a call")
    };
    new.0.logprobs = Some(bits.map(f32::from_bits).to_vec());
    let (kind, payload) = encode(&record);
    let Ok(Record::Rollout { record: RolloutRecord::Call(CallRecord::New(new)), .. }) = decode(kind, &payload) else {
        panic!("it is a call")
    };
    let read: Vec<u32> = new.0.logprobs.iter().flatten().map(|value| value.to_bits()).collect();
    assert_eq!(read, bits);
}

#[test]
fn what_is_written_is_appended() {
    let record = call_of(100, 50);
    let encoding = Encoding::of(&record);
    let mut buffer = vec![1, 2, 3];
    encoding.write_to(&mut buffer);
    assert_eq!(buffer[..3], [1, 2, 3]);
    assert_eq!((encoding.kind(), buffer[3..].to_vec()), encode(&record));
}

#[test]
fn a_call_costs_little_more_than_its_arrays() {
    for (new, generated) in [(1000, 0), (700, 300), (0, 1000), (30_000, 2000)] {
        let payload = encode(&call_of(new, generated)).1.len();
        let arrays = 4 * new as usize + 8 * generated;
        assert!(payload - arrays < 150, "{} bytes besides those of the arrays", payload - arrays);
    }
}
