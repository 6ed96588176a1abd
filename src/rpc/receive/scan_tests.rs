//! Lists that are too long, and requests that mean nothing, as they are sent.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::HashMap;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FileDescriptorSet};

use super::*;
use crate::proto::{FILE_DESCRIPTOR_SET, v1};
use crate::rpc::receive::lists::{Listed, of_method};

const BATCH: &str = "/hedgerow.v1.HarnessService/ReportBatch";

fn refusal(result: Result<usize, Refusal>) -> (Reason, String) {
    let refusal = result.unwrap_err();
    (refusal.reason, refusal.field.unwrap_or_default())
}

/// A message with this one in this field.
fn within(tag: u8, message: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    prost::encoding::encode_varint(message.len() as u64, &mut bytes);
    bytes.extend(message);
    bytes
}

#[test]
fn what_has_many_fields_takes_long_and_what_has_long_ones_does_not() {
    use v1::report_request::Event;
    let is_long = |event| {
        let request = v1::ReportRequest { event: Some(event), ..v1::ReportRequest::default() };
        super::is_long(v1::ReportRequest::SHAPE, &request.encode_to_vec())
    };
    let kept = |calls: usize| {
        let list = v1::CallList { call_ids: vec!["c".to_owned(); calls] };
        let kept = v1::KeptCalls { agents: [("a".to_owned(), list)].into() };
        Event::Seal(v1::Seal { kept: Some(kept), ..v1::Seal::default() })
    };
    assert!(!is_long(kept(limits::LONG_MESSAGE_FIELDS / 2)) && is_long(kept(limits::LONG_MESSAGE_FIELDS)));
    let credits = vec![v1::Credit::default(); limits::LONG_MESSAGE_FIELDS];
    assert!(is_long(Event::Reward(v1::Reward { credits, ..v1::Reward::default() })));
    assert!(!is_long(Event::Call(v1::Call { generation_token_ids: vec![7; 8 << 20].into(), ..v1::Call::default() })));
}

#[test]
fn requests_are_counted_however_small_they_are() {
    let batch = |requests| v1::ReportBatchRequest { requests: vec![v1::ReportRequest::default(); requests] };
    let count = |message: &[u8]| super::batch(of_method(BATCH), message);
    let one = size_of::<v1::ReportRequest>();
    assert_eq!(count(&batch(0).encode_to_vec()), Ok(0));
    assert_eq!(count(&batch(limits::BATCH_REQUESTS_MAX).encode_to_vec()), Ok(limits::BATCH_REQUESTS_MAX * one));
    let many = batch(limits::BATCH_REQUESTS_MAX + 1).encode_to_vec();
    assert_eq!(refusal(count(&many)), (Reason::OverLimit, "requests".to_owned()));
    let request = v1::ReportRequest { request_seq: 300, ..v1::ReportRequest::default() };
    let mut cut = v1::ReportBatchRequest { requests: vec![request; 3] }.encode_to_vec();
    cut.truncate(cut.len() - 1);
    assert_eq!(count(&cut), Ok(3 * one));
    assert_eq!(count(&[0xff; 40]), Ok(0));
}

#[test]
fn lists_that_are_too_long_are_refused_by_name_wherever_they_stand() {
    let ids = |many: usize| [0x0a, 0].repeat(many);
    let agent = |list: &[u8]| within(1, &within(2, list));
    let seal = |kept: &[u8]| within(7, &within(1, kept));
    let most = limits::KEPT_CALLS_MAX;
    let halves = |many: usize| [agent(&ids(many / 2)), agent(&ids(many - many / 2))].concat();
    let count = |message: &[u8]| request(v1::ReportRequest::SHAPE, message);
    assert!(count(&seal(&halves(most))).is_ok());
    let cases = [
        (seal(&halves(most + 1)), "seal.kept.agents"),
        (seal(&agent(&[]).repeat(limits::ROLLOUT_AGENTS_MAX + 1)), "seal.kept.agents"),
        (within(9, &within(1, &within(1, &halves(most + 1)))), "finish.seal.kept.agents"),
        // Parts of one message are put together.
        ([seal(&agent(&ids(most))), seal(&agent(&ids(1)))].concat(), "seal.kept.agents"),
        (within(6, &within(4, &ids(most + 1))), "agent_end.kept"),
        (within(6, &[0x2a, 0].repeat(limits::ROLLOUT_AGENTS_MAX + 1)), "agent_end.answers_read_agent_ids"),
        (within(4, &[0x8a, 1, 0].repeat(limits::NOT_YET_LISTED_MAX + 1)), "call.columns"),
        (within(4, &[0x42, 0].repeat(limits::CALL_VERSION_SPANS_MAX + 1)), "call.policy_versions"),
        (within(3, &[0x12, 0].repeat(limits::TAGS_MAX + 1)), "open.tags"),
        (within(8, &[0x1a, 0].repeat(limits::ROLLOUT_CREDITS_MAX + 1)), "reward.credits"),
    ];
    for (message, field) in &cases {
        assert_eq!(refusal(count(message)), (Reason::OverLimit, (*field).to_owned()));
        // In a batch it is refused when its turn comes; only many of them are too much.
        assert!(super::batch(of_method(BATCH), &within(1, message)).is_ok(), "{field}");
    }
    let many = within(1, &cases[0].0).repeat(20);
    assert_eq!(refusal(super::batch(of_method(BATCH), &many)), (Reason::OverLimit, "requests".to_owned()));
    let packed = within(3, &[1; limits::FILTER_STATES_MAX + 1]);
    let states = request(of_method("/hedgerow.v1.InspectService/ListRollouts"), &packed);
    assert_eq!(refusal(states), (Reason::OverLimit, "states".to_owned()));
}

fn request_seq(message: &[u8]) -> Option<u64> {
    told(message).map(|told| told.request_seq)
}

#[test]
fn the_number_of_a_request_is_found_though_it_cannot_be_decoded() {
    let odd_id = [0x12, 4, 0x0a, 2, 0xff, 0xfe];
    assert_eq!(request_seq(&[&[0x08, 0xac, 2], &odd_id[..]].concat()), Some(300));
    assert_eq!(request_seq(&[&odd_id[..], &[0x08, 7]].concat()), Some(7));
    assert_eq!(request_seq(&odd_id), Some(0), "left out, it is 0");
    assert_eq!(request_seq(&[0x08, 7, 0x12, 0xff]), Some(7), "what follows goes on beyond the end");
    let rollout = v1::RolloutRef { rollout_id: "x".to_owned(), ..v1::RolloutRef::default() };
    let call = v1::Call { call_id: "c".to_owned(), agent_id: "a".to_owned(), ..v1::Call::default() };
    let event = Some(v1::report_request::Event::Call(call));
    let request = v1::ReportRequest { request_seq: 1, rollout: Some(rollout.clone()), event };
    let told = told(&request.encode_to_vec()).unwrap();
    let (call, agent) = (told.call.unwrap().to_string(), told.agent.unwrap().to_string());
    assert_eq!((told.rollout, call.as_str(), agent.as_str()), (Some(rollout), "c", "a"));
    for broken in [&[0x12, 0xff][..], &[0x0b], &[0x12, 9, 1], &[0x07], &[0x08]] {
        assert_eq!(request_seq(broken), None, "{broken:?}");
    }
}

/// The messages of the contract, by their full names.
struct Contract(HashMap<String, DescriptorProto>);

impl Contract {
    fn add(&mut self, scope: &str, message: &DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        message.nested_type.iter().for_each(|nested| self.add(&name, nested));
        self.0.insert(name, message.clone());
    }

    fn has_lists(&self, message: &str) -> bool {
        let fields = &self.0[message].field;
        let is_message = |kind: Type| kind == Type::Message;
        fields.iter().any(|field| {
            field.label() == Label::Repeated || (is_message(field.r#type()) && self.has_lists(field.type_name()))
        })
    }

    /// Lists of this message that are not in the shape.
    fn missing(&self, message: &str, shape: &Shape) -> Vec<String> {
        let mut missing = Vec::new();
        for field in &self.0[message].field {
            let is_list = field.label() == Label::Repeated;
            let inside = (field.r#type() == Type::Message).then(|| field.type_name());
            let known = shape.0.iter().find(|known| Some(known.tag) == u32::try_from(field.number()).ok());
            match known {
                Some(known) => {
                    assert_eq!(known.list.is_some(), is_list, "{message}.{}", field.name());
                    let numbers = matches!(field.r#type(), Type::Enum | Type::Uint32 | Type::Uint64);
                    let packed = known.list.as_ref().map(|list| list.is_packed);
                    assert_eq!(packed.unwrap_or(false), is_list && numbers, "{message}.{}", field.name());
                    missing.extend(inside.into_iter().flat_map(|inside| self.missing(inside, known.inside)));
                }
                None if is_list || inside.is_some_and(|inside| self.has_lists(inside)) => {
                    missing.push(format!("{message}.{}", field.name()));
                }
                None => {}
            }
        }
        missing
    }
}

#[test]
fn every_list_that_a_request_may_have_is_counted() {
    let files = FileDescriptorSet::decode(FILE_DESCRIPTOR_SET).unwrap();
    let mut contract = Contract(HashMap::new());
    for file in &files.file {
        file.message_type.iter().for_each(|message| contract.add(&format!(".{}", file.package()), message));
    }
    let mut methods = 0;
    for file in files.file.iter().filter(|file| file.package() == "hedgerow.v1") {
        for service in &file.service {
            for method in &service.method {
                let path = format!("/hedgerow.v1.{}/{}", service.name(), method.name());
                let shape = match path.as_str() {
                    "/hedgerow.v1.HarnessService/Report" => v1::ReportRequest::SHAPE,
                    "/hedgerow.v1.TrainerService/Subscribe" => v1::SubscribeRequest::SHAPE,
                    path => of_method(path),
                };
                assert_eq!(contract.missing(method.input_type(), shape), Vec::<String>::new(), "{path}");
                methods += 1;
            }
        }
    }
    assert!(methods > 15);
}
