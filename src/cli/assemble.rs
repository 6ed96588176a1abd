//! Parts of units become whole rows.
//!
//! The parts of a unit come in order, with no part of another unit between them; anything else is an error that says
//! what is wrong, and so is a row whose arrays are not as long as its header says.

use std::mem;

use crate::proto::v1::{GroupFigures, RowHeader, RowPart, Span, UnitPart};

/// A unit with all its rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeUnit {
    /// Its id.
    pub unit_id: String,
    /// How often it has been given out.
    pub delivery_count: u32,
    /// Goes into its ack.
    pub seek_count: u64,
    /// Its tokens, as credit counts them.
    pub tokens: u64,
    /// Its group, where it waited for one.
    pub group: Option<GroupFigures>,
    /// Its rows.
    pub rows: Vec<WholeRow>,
}

/// A row with all its tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WholeRow {
    /// Its id.
    pub row_id: String,
    /// What it is.
    pub header: RowHeader,
    /// The calls of its walk, in order.
    pub spans: Vec<Span>,
    /// Its ids.
    pub token_ids: Vec<u32>,
    /// 1 where it trains, else 0.
    pub loss_mask: Vec<u8>,
    /// The log-probabilities where it trains, else 0.
    pub logprobs: Vec<f32>,
}

/// What is wrong with a part.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unit {unit_id}: {problem}")]
pub struct AssemblyError {
    /// The unit.
    pub unit_id: String,
    /// What is wrong.
    pub problem: String,
}

/// The unit that is coming in, in parts.
#[derive(Debug, Default)]
pub struct RowAssembler {
    unit: Option<WholeUnit>,
    next_part: u32,
    /// The last row goes on in the next part.
    row_open: bool,
}

impl RowAssembler {
    /// Takes the next part; gives the unit when it is whole.
    ///
    /// # Errors
    /// If the part does not continue what came before; what came before is dropped.
    pub fn take(&mut self, part: UnitPart) -> Result<Option<WholeUnit>, AssemblyError> {
        let unit_id = part.unit_id.clone();
        self.take_part(part).map_err(|problem| {
            *self = Self::default();
            AssemblyError { unit_id, problem }
        })
    }

    fn take_part(&mut self, part: UnitPart) -> Result<Option<WholeUnit>, String> {
        if part.part_index != self.next_part {
            return Err(format!("part {} came, part {} was to come", part.part_index, self.next_part));
        }
        let mut unit = self.unit.take().unwrap_or_else(|| WholeUnit {
            unit_id: part.unit_id.clone(),
            delivery_count: part.delivery_count,
            seek_count: part.seek_count,
            tokens: part.unit_tokens,
            ..WholeUnit::default()
        });
        if unit.unit_id != part.unit_id {
            return Err(format!("came before unit {} was whole", unit.unit_id));
        }
        unit.group = unit.group.or(part.group);
        for row in part.rows {
            self.take_row_part(&mut unit.rows, row)?;
        }
        if !part.last {
            self.next_part += 1;
            self.unit = Some(unit);
            return Ok(None);
        }
        self.next_part = 0;
        if self.row_open {
            return Err("ended within a row".to_owned());
        }
        let (rows, said) = (unit.rows.len(), part.unit_rows);
        if rows != said as usize {
            return Err(format!("has {rows} rows, and says that it has {said}"));
        }
        Ok(Some(unit))
    }

    fn take_row_part(&mut self, rows: &mut Vec<WholeRow>, part: RowPart) -> Result<(), String> {
        if !mem::replace(&mut self.row_open, !part.last) {
            let header = part.header.ok_or_else(|| format!("row {} has no header", part.row_id))?;
            rows.push(WholeRow { row_id: part.row_id.clone(), header, ..WholeRow::default() });
        }
        let Some(row) = rows.last_mut().filter(|row| row.row_id == part.row_id) else {
            return Err(format!("row {} came before another was whole", part.row_id));
        };
        let problem = |what: String| Err(format!("row {}: {what}", part.row_id));
        if part.token_offset != row.token_ids.len() as u64 {
            return problem(format!("token {} came, {} was to come", part.token_offset, row.token_ids.len()));
        }
        let ((ids, ids_rest), (logprobs, logprobs_rest)) = (part.token_ids.as_chunks(), part.logprobs.as_chunks());
        if !ids_rest.is_empty() || !logprobs_rest.is_empty() {
            return problem("has an array whose bytes are no multiple of four".to_owned());
        }
        if ids.len() != part.loss_mask.len() || ids.len() != logprobs.len() {
            let (ids, mask, logprobs) = (ids.len(), part.loss_mask.len(), logprobs.len());
            return problem(format!("has {ids} ids, {mask} masks, {logprobs} log-probabilities"));
        }
        row.token_ids.extend(ids.iter().map(|&bytes| u32::from_le_bytes(bytes)));
        row.loss_mask.extend_from_slice(&part.loss_mask);
        row.logprobs.extend(logprobs.iter().map(|&bytes| f32::from_le_bytes(bytes)));
        row.spans.extend(part.spans);
        let (tokens, spans) = (row.token_ids.len() as u64, row.spans.len());
        let whole = tokens == row.header.tokens && spans == row.header.span_count as usize;
        if part.last && !whole {
            let (said, said_spans) = (row.header.tokens, row.header.span_count);
            return problem(format!("has {tokens} ids of {said} and {spans} spans of {said_spans}"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::expect_used, reason = "a test fails by panicking")]

    use super::*;

    const IDS: [u32; 5] = [7, 8, 9, 10, u32::MAX];
    const LOGPROBS: [f32; 5] = [0.0, 0.0, -0.1, -0.2, -0.3];
    const MASK: [u8; 5] = [0, 0, 1, 1, 1];

    /// The tokens from..to of a row of five.
    fn row(id: &str, from: usize, to: usize) -> RowPart {
        let first = from == 0;
        RowPart {
            row_id: id.to_owned(),
            header: first.then(|| RowHeader { tokens: 5, span_count: 1, ..RowHeader::default() }),
            spans: if first { vec![Span { end: 5, start: 2, ..Span::default() }] } else { Vec::new() },
            token_offset: from as u64,
            token_ids: IDS[from..to].iter().flat_map(|id| id.to_le_bytes()).collect(),
            loss_mask: MASK[from..to].iter().copied().collect(),
            logprobs: LOGPROBS[from..to].iter().flat_map(|logprob| logprob.to_le_bytes()).collect(),
            last: to == 5,
            ..RowPart::default()
        }
    }

    fn part(part_index: u32, last: bool, rows: Vec<RowPart>) -> UnitPart {
        UnitPart { unit_id: "u".to_owned(), part_index, last, unit_rows: 2, rows, ..UnitPart::default() }
    }

    #[test]
    fn parts_become_whole_rows_wherever_they_are_cut() {
        for cut in 1..5 {
            let mut assembler = RowAssembler::default();
            assert_eq!(assembler.take(part(0, false, vec![row("a", 0, cut)])), Ok(None));
            let second = part(1, false, vec![row("a", cut, 5), row("b", 0, cut)]);
            assert_eq!(assembler.take(second), Ok(None));
            let unit = assembler.take(part(2, true, vec![row("b", cut, 5)])).expect("fits").expect("whole");
            assert_eq!(unit.rows.iter().map(|row| row.row_id.as_str()).collect::<Vec<_>>(), ["a", "b"]);
            for row in &unit.rows {
                assert_eq!((row.token_ids.as_slice(), row.loss_mask.as_slice()), (&IDS[..], &MASK[..]));
                assert_eq!(row.logprobs, LOGPROBS);
            }
            // And it begins anew.
            let both = part(0, true, vec![row("a", 0, 5), row("b", 0, 5)]);
            assert_eq!(assembler.take(both).expect("fits").expect("whole").rows.len(), 2);
        }
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let after = |first: UnitPart, second: UnitPart| {
            let mut assembler = RowAssembler::default();
            assembler.take(first).expect("the first part fits");
            assembler.take(second).expect_err("an error").problem
        };
        let first = || part(0, false, vec![row("a", 0, 2)]);
        assert!(after(first(), part(2, true, vec![row("a", 2, 5)])).contains("part 2 came"));
        assert!(after(first(), part(1, false, vec![row("a", 3, 5)])).contains("token 3 came, 2 was to come"));
        assert!(after(first(), part(1, false, vec![row("b", 0, 5)])).contains("before another was whole"));
        assert!(after(first(), part(1, true, vec![row("a", 2, 4)])).contains("within a row"));
        assert!(after(first(), part(1, true, vec![row("a", 2, 5)])).contains("1 rows, and says that it has 2"));
        let other = UnitPart { unit_id: "v".to_owned(), ..part(1, true, Vec::new()) };
        assert!(after(first(), other).contains("before unit u was whole"));
        let mut short = row("a", 2, 5);
        short.loss_mask = bytes::Bytes::new();
        assert!(after(first(), part(1, false, vec![short])).contains("3 ids, 0 masks"));
    }
}
