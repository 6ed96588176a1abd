//! Bytes that are no record: errors that say what and where, and never a panic.

use bytes::BufMut;
use proptest::collection::vec;
use proptest::prelude::*;
use prost::encoding::{WireType, encode_key, encode_varint};

use super::super::{Fault, LAST_KIND, decode, encode};
use super::samples::{later_samples, samples};
use super::strategies::record;
use crate::ids::IdentifierError;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_do_not_panic(kind in any::<u8>(), payload in vec(any::<u8>(), 0..200)) {
        let _ = decode(kind, &payload);
    }

    /// Beyond the first layer, where most arbitrary bytes end.
    #[test]
    fn records_with_some_bytes_changed_do_not_panic(
        record in record(),
        changes in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (kind, mut payload) = encode(&record);
        for (place, byte) in changes {
            let place = place.index(payload.len());
            payload[place] = byte;
        }
        if let Ok(read) = decode(kind, &payload) {
            let (kind, payload) = encode(&read);
            prop_assert!(decode(kind, &payload).is_ok());
        }
    }

    #[test]
    fn what_is_cut_is_an_error(record in record(), place in any::<proptest::sample::Index>()) {
        let (kind, payload) = encode(&record);
        prop_assert!(decode(kind, &payload[..place.index(payload.len())]).is_err());
    }
}

#[test]
fn samples_that_are_cut_anywhere_are_errors() {
    for (name, record) in samples().into_iter().chain(later_samples()) {
        let (kind, payload) = encode(&record);
        for length in 0..payload.len() {
            assert!(decode(kind, &payload[..length]).is_err(), "{name}, cut after {length} bytes");
        }
    }
}

/// One field of a message.
enum Field<'a> {
    Text(u32, &'a str),
    Number(u32, u64),
    Message(u32, &'a [Field<'a>]),
    Bytes(u32, &'a [u8]),
}

fn message(fields: &[Field<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for field in fields {
        let (tag, inside) = match field {
            Field::Number(tag, value) => {
                encode_key(*tag, WireType::Varint, &mut bytes);
                encode_varint(*value, &mut bytes);
                continue;
            }
            Field::Text(tag, text) => (tag, text.as_bytes().to_vec()),
            Field::Message(tag, fields) => (tag, message(fields)),
            Field::Bytes(tag, inside) => (tag, inside.to_vec()),
        };
        encode_key(*tag, WireType::LengthDelimited, &mut bytes);
        encode_varint(inside.len() as u64, &mut bytes);
        bytes.put_slice(&inside);
    }
    bytes
}

use Field::{Bytes, Message, Number, Text};

fn fault(kind: u8, fields: &[Field<'_>]) -> Fault {
    let error = decode(kind, &message(&[Message(u32::from(kind), fields)])).unwrap_err();
    assert_eq!(error.kind, kind);
    error.fault
}

/// Of a record that says this of a rollout.
fn in_rollout(field: Field<'_>) -> Fault {
    fault(5, &[Text(1, "r"), Text(2, "o"), field])
}

#[test]
fn an_identifier_that_is_none_is_named() {
    let why = IdentifierError::Empty;
    assert_eq!(fault(2, &[]), Fault::Identifier { field: "run", why });
    assert_eq!(fault(3, &[Text(1, "r")]), Fault::Identifier { field: "group", why });
    let why = IdentifierError::ControlCharacter(1);
    assert_eq!(fault(3, &[Text(1, "r"), Text(2, "g\n")]), Fault::Identifier { field: "group", why });
    let why = IdentifierError::TooLong(257);
    assert_eq!(fault(2, &[Text(1, &"r".repeat(257))]), Fault::Identifier { field: "run", why });
}

#[test]
fn what_a_newer_version_wrote_is_refused_as_such() {
    assert_eq!(decode(0, &[]).unwrap_err().fault, Fault::UnknownKind);
    assert_eq!(decode(LAST_KIND + 1, &[]).unwrap_err().fault, Fault::UnknownKind);
    let newer = Fault::UnknownCode { field: "reason", code: 99 };
    assert_eq!(fault(8, &[Text(1, "r"), Text(2, "c"), Text(3, "u"), Number(4, 99)]), newer);
    assert_eq!(fault(8, &[Text(1, "r"), Text(2, "c"), Text(3, "u")]), Fault::Missing("reason"));
    let rollout = [Text(1, "r"), Text(2, "o"), Message(60, &[Text(1, "news")])];
    assert_eq!(fault(5, &rollout), Fault::Missing("what happened to the rollout"));
    let error = decode(8, &message(&[Message(8, &[Text(1, "r"), Text(2, "c"), Number(4, 99)])])).unwrap_err();
    let said = "a record of kind 8 cannot be read: \
                reason is 99, which this version does not know; a newer version wrote it";
    assert_eq!(error.to_string(), said);
}

#[test]
fn a_field_that_is_not_known_is_passed_over() {
    let known = [Text(1, "r"), Text(2, "g"), Number(3, 8)];
    let more = [Text(1, "r"), Number(40, 7), Text(2, "g"), Message(41, &known), Number(3, 8), Bytes(42, &[1, 2])];
    let read = |fields| decode(3, &message(&[Message(3, fields)]));
    assert_eq!(read(&more), read(&known));
    assert!(read(&known).is_ok());
}

#[test]
fn a_payload_of_another_kind_is_an_error() {
    for (name, record) in samples() {
        let (kind, payload) = encode(&record);
        for other in (1..=LAST_KIND).filter(|other| *other != kind) {
            assert!(decode(other, &payload).is_err(), "{name} as {other}");
        }
    }
}

#[test]
fn fields_that_do_not_go_together_are_errors() {
    let call = |fields: &[Field<'_>]| in_rollout(Message(6, &[Message(1, fields)]));
    assert_eq!(call(&[Text(1, "c"), Number(5, 3)]), Fault::Missing("link_parent"));
    assert_eq!(call(&[Number(5, 1), Text(6, "c")]), Fault::Contradiction("link_parent"));
    let start = |fields: &[Field<'_>]| in_rollout(Message(8, fields));
    assert_eq!(start(&[Text(1, "a"), Number(5, 2)]), Fault::Missing("fork_of"));
    assert_eq!(start(&[Text(1, "a"), Text(6, "c")]), Fault::Contradiction("fork_of"));
    let prompt = |fields: &[Field<'_>]| in_rollout(Message(6, &[Message(2, &[Text(1, "c"), Message(2, fields)])]));
    assert_eq!(prompt(&[]), Fault::Missing("prompt"));
    assert_eq!(prompt(&[Message(1, &[Number(2, 5)])]), Fault::Contradiction("prompt.base_length"));
    let tags = [Message(2, &[Text(1, "t"), Text(2, "1")]), Message(2, &[Text(1, "t"), Text(2, "2")])];
    assert_eq!(in_rollout(Message(4, &tags)), Fault::Repeated("tags"));
}

#[test]
fn arrays_of_a_wrong_length_are_errors() {
    let prompt = |fields: &[Field<'_>]| {
        in_rollout(Message(6, &[Message(2, &[Text(1, "c"), Message(2, &[Message(2, fields)])])]))
    };
    let array = |bytes| Message(4, bytes);
    let digest = Bytes(3, &[0; 16]);
    let fault = prompt(&[Text(1, "b"), digest, array(&[Bytes(1, &[0; 7])])]);
    assert_eq!(fault, Fault::Length { field: "prompt.suffix", bytes: 7 });
    assert_eq!(prompt(&[Text(1, "b"), Bytes(3, &[0; 15])]), Fault::Length { field: "prompt.digest", bytes: 15 });
    // An array that claims more than the payload has is not even reserved.
    let mut claims_much = Vec::new();
    encode_key(1, WireType::LengthDelimited, &mut claims_much);
    encode_varint(u64::MAX, &mut claims_much);
    assert!(matches!(prompt(&[Text(1, "b"), Bytes(3, &[0; 16]), Bytes(4, &claims_much)]), Fault::Malformed(_)));
}
