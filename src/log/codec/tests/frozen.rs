//! Bytes that version 1 wrote. They stand in logs and must be read for ever, so they never change here: a build that reads
//! them otherwise loses what it was trusted with. What newer versions write is added beside them, under its own name.

use super::super::{decode, encode};
use super::in_bits;
use super::samples::{later_samples, samples};
use crate::log::Record;

/// Version 1: the record's name, its kind, its payload.
const VERSION_1: &[(&str, u8, &str)] = &[
    (
        "run",
        1,
        "0a620a0572756e2d3110031a570a300a046d61696e0a056a7564676512046d61696e1802200228023002380140024880 \
         a3095080aea60a58c0cf2460c1cf2410051880dddb012080a8cc7b2a170a07747261696e657212046d61696e18022080 \
         80022802",
    ),
    ("run_deleted", 2, "12070a0572756e2d31"),
    ("group_size", 3, "1a0d0a0572756e2d31120267371808"),
    ("rollout_opened", 4, "22160a0572756e2d31120567372d72331802220267372803"),
    ("open", 5, "2a2e0a0572756e2d31120567372d72331802221c080812030a017412130a047461736b120b736f72742061206c697374"),
    ("group", 5, "2a140a0572756e2d31120567372d723318022a026737"),
    (
        "new_call",
        5,
        "2a9f010a0572756e2d31120567372d72331802328c010a89010a02633212037375621a046d61696e2002280332026331 \
         3a047475726e42046d61696e4a05100218b8024a070802100318b90252056d6f64656c5a0e0a0c070000007f510200ff \
         ffffff620e0a0c000080be3412c07f000000806801720473746f707a150a130a0263311080051a0a0a08010000000200 \
         0000800180d8c1a28c348801a0f7c1a28c34",
    ),
    (
        "waiting_call",
        5,
        "2a520a0572756e2d31120567372d7233180232400a3e0a02633312046d61696e28023a0570726f626542056a75646765 \
         7a2212200a02633910401a103031323334353637383961626364656622060a0405000000",
    ),
    ("later_prompt", 5, "2a2c0a0572756e2d31120567372d72331802321a12180a02633312120a101a0e0a0c030000000400000005000000"),
    ("parent_agent", 5, "2a1c0a0572756e2d31120567372d723318023a0a0a02633212046d61696e"),
    (
        "parent_agent_with_prompt",
        5,
        "2a380a0572756e2d31120567372d723318023a260a02633212046d61696e1a1a12180a02633312120a101a0e0a0c0300 \
         00000400000005000000",
    ),
    (
        "agent_start",
        5,
        "2a3a0a0572756e2d31120567372d7233180242280a0373756210011a046d61696e220263312802320263313a08657870 \
         6c6f72657242056d6f64656c",
    ),
    ("agent_end", 5, "2a2c0a0572756e2d31120567372d723318024a1a0a037375621001180422080a0263320a0263332a056f74686572"),
    (
        "seal_and_reward",
        5,
        "2a5b0a0572756e2d31120567372d7233180252490a170a130a0a0a046d61696e120263310a050a037375621003122e09 \
         000000000000e03f12110a06666f726d617411000000000000008012100a05746573747311000000000000e83f",
    ),
    ("nothing_said_at_the_end", 5, "2a120a0572756e2d31120567372d723318025200"),
    ("discard", 5, "2a280a0572756e2d31120567372d723318025a160a107468652073616e64626f78206469656410031801"),
    ("conflict", 5, "2a140a0572756e2d31120567372d7233180262026332"),
    ("decision", 5, "2a120a0572756e2d31120567372d723318026804"),
    ("consumer_group", 6, "32240a0572756e2d311207747261696e65721a100a046d61696e100218808002200128052001"),
    (
        "acknowledged",
        7,
        "3a380a0572756e2d311207747261696e65721a1272756e2d312f67372d72332f322f6d61696e1a1272756e2d312f6737 \
         2d72342f302f6d61696e",
    ),
    ("unit_dropped", 8, "42260a0572756e2d311207747261696e65721a1272756e2d312f67372d72332f322f6d61696e2004"),
    ("unit_released", 9, "4a240a0572756e2d311207747261696e65721a1272756e2d312f67372d72332f322f6d61696e"),
    ("rollout_opened_in_a_group_of_known_size", 4, "22180a0572756e2d31120567372d723318022202673728033008"),
    ("snapshot_begins", 10, "52020801"),
    (
        "run_snapshot",
        11,
        "5a7c0a620a0572756e2d3110031a570a300a046d61696e0a056a7564676512046d61696e180220022802300238014002 \
         4880a3095080aea60a58c0cf2460c1cf2410051880dddb012080a8cc7b2a170a07747261696e657212046d61696e1802 \
         2080800228021080d8c1a28c341a0f0a07747261696e6572120410012805",
    ),
    (
        "tombstones",
        12,
        "62440a0572756e2d3112210a0567372d72331002220c69646c655f74696d656f757432080a0267371008180412180a02 \
         723410021801220c61636b6e6f776c65646765642801",
    ),
    (
        "rollout_copy_begins",
        13,
        "6a8c010a0572756e2d31120567372d7233180222026737280332300a046d61696e0a056a7564676512046d61696e1802 \
         200228023002380140024880a3095080aea60a58c0cf2460c1cf243880d8c1a28c3440114a390a07747261696e657212 \
         1472756e2d312f67372d72332f322f6d61696e2f611a180a1472756e2d312f67372d72332f322f6d61696e2f621004",
    ),
    ("rollout_copied", 14, "72140a0572756e2d31120567372d7233180262026332"),
    (
        "run_totals",
        15,
        "7a6a0a0572756e2d311214080110031809220c0a046d61696e1005180220011a120a0c69646c655f74696d656f757410 \
         02180720062a350a07747261696e65721214080110031809220c0a046d61696e1005180220011a070804108005180422 \
         0b0804120708011080051801",
    ),
];

/// What is written in version 1 since consumer groups can be sought and rollouts retained.
const LATER: &[(&str, u8, &str)] = &[
    ("rollouts_retired", 16, "82011a0a0572756e2d3112090a0567372d7233100212040a0272341803"),
    ("consumer_group_expired", 17, "8a01100a0572756e2d311207747261696e6572"),
    ("sought", 18, "9201130a0572756e2d311207747261696e657218e724"),
    (
        "run_that_retains",
        1,
        "0a7c0a0572756e2d3110031a710a300a046d61696e0a056a7564676512046d61696e1802200228023002380140024880 \
         a3095080aea60a58c0cf2460c1cf2410051880dddb012080a8cc7b2a170a07747261696e657212046d61696e18022080 \
         800228023207747261696e657238e0d40340004880808080045080dddb01",
    ),
    (
        "run_snapshot_after_seeks",
        11,
        "5a80010a620a0572756e2d3110031a570a300a046d61696e0a056a7564676512046d61696e1802200228023002380140 \
         024880a3095080aea60a58c0cf2460c1cf2410051880dddb012080a8cc7b2a170a07747261696e657212046d61696e18 \
         022080800228021080d8c1a28c341a130a07747261696e657212041001280518112002",
    ),
    (
        "run_totals_with_what_is_forgotten",
        15,
        "7a720a0572756e2d311214080110031809220c0a046d61696e1005180220011a120a0c69646c655f74696d656f757410 \
         02180720062a3d0a07747261696e65721214080110031809220c0a046d61696e1005180220011a070804108005180422 \
         0b08041207080110800518012863307838324046",
    ),
    (
        "rollout_copy_begins_with_histories",
        13,
        "6aa9010a0572756e2d31120567372d7233180222026737280332300a046d61696e0a056a7564676512046d61696e1802 \
         200228023002380140024880a3095080aea60a58c0cf2460c1cf243880d8c1a28c3440114a560a07747261696e657212 \
         1472756e2d312f67372d72332f322f6d61696e2f611a180a1472756e2d312f67372d72332f322f6d61696e2f62100422 \
         1b0a1472756e2d312f67372d72332f322f6d61696e2f61120328323c",
    ),
];

#[test]
fn what_came_later_is_read_and_written() {
    are_read(&later_samples(), LATER);
    are_written(&later_samples(), LATER);
}

#[test]
fn version_1_is_read() {
    are_read(&samples(), VERSION_1);
}

/// As long as this build writes version 1. A newer one that writes more drops this test, and keeps the one above.
#[test]
fn version_1_is_written() {
    are_written(&samples(), VERSION_1);
}

type Frozen = [(&'static str, u8, &'static str)];

fn are_read(samples: &[(&str, Record)], frozen: &Frozen) {
    for (name, record) in samples {
        let known = frozen.iter().find(|(known, _, _)| known == name);
        let Some((_, kind, hex)) = known else { panic!("{name} has no frozen bytes") };
        assert_eq!(decode(*kind, &bytes(hex)).as_ref().map(in_bits), Ok(in_bits(record)), "{name}");
    }
    assert_eq!(frozen.len(), samples.len());
}

fn are_written(samples: &[(&str, Record)], frozen: &Frozen) {
    for (name, record) in samples {
        let (kind, payload) = encode(record);
        let hex: String = payload.iter().map(|byte| format!("{byte:02x}")).collect();
        let known = frozen.iter().find(|(known, _, _)| known == name);
        assert_eq!(known.map(|(_, kind, hex)| (*kind, hex.replace([' ', '\n'], ""))), Some((kind, hex)), "{name}");
    }
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits: Vec<u8> = hex.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect()
}
