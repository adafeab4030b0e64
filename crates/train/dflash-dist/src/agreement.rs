//! Compares, before the ranks connect, everything that they must have in common.
//!
//! Ranks with different settings would train a useless draft, or wait for each other forever in
//! collectives of different shapes. So every rank writes its settings into the store, signs in with
//! a digest of them, and compares all digests. Only if they differ is more read. This needs only
//! the store: gloo's connections come later.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use dflash_torch_sys::{Error as TorchError, Store};

use crate::wait::until;

/// Interval between checks of which ranks have compared.
const POLL: Duration = Duration::from_millis(20);

/// How long a rank that found a difference waits for the others to find it, because the store may
/// end with this rank.
const LAST_TO_COMPARE: Duration = Duration::from_secs(5);

/// The number of ranks that have compared.
const COMPARED_KEY: &str = "compared";

/// Separates the texts of a rank's record, none of which contains it.
const SEPARATOR: char = '\0';

/// A value that the ranks should have in common but do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Its name, such as a flag.
    pub name: String,
    /// Its values, each with the ranks that have it; `None` if a rank does not have it.
    pub values: Vec<(Option<String>, Vec<usize>)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values.iter().map(|(value, ranks)| {
            format!("{} on {}", value.as_deref().unwrap_or("unknown"), ranks_text(ranks))
        });
        write!(f, "{} is {}", self.name, values.collect::<Vec<_>>().join(" and "))
    }
}

/// `rank 3`, or `ranks 0, 2-5`.
fn ranks_text(ranks: &[usize]) -> String {
    let mut spans: Vec<(usize, usize)> = Vec::new();
    for &rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank => *last = rank,
            _ => spans.push((rank, rank)),
        }
    }
    let span = |&(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        1 => format!("{first}, {last}"),
        _ => format!("{first}-{last}"),
    };
    let text = spans.iter().map(span).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {text}") } else { format!("ranks {text}") }
}

/// Records that this rank has arrived, and its settings.
pub(crate) fn sign_in(
    store: &Store,
    rank: usize,
    common: &[(String, String)],
) -> Result<(), TorchError> {
    let record = record(common);
    store.set(&record_key(rank), record.as_bytes())?;
    // Write the record before the digest, so that whoever sees the digest can read the record.
    store.set(&present_key(rank), digest(&record).as_bytes())
}

/// The key that shows that a rank has arrived.
pub(crate) fn present_key(rank: usize) -> String {
    format!("present/{rank}")
}

fn record_key(rank: usize) -> String {
    format!("common/{rank}")
}

/// The differences between the ranks, all of which have signed in; all ranks get the same result.
pub(crate) fn differences(store: &Store, world_size: usize) -> Result<Vec<Difference>, TorchError> {
    let mut groups: BTreeMap<Vec<u8>, Vec<usize>> = BTreeMap::new();
    for rank in 0..world_size {
        groups.entry(store.get(&present_key(rank))?).or_default().push(rank);
    }
    if groups.len() == 1 {
        return Ok(Vec::new());
    }
    let mut groups: Vec<Vec<usize>> = groups.into_values().collect();
    groups.sort_unstable();
    let mut records = Vec::new();
    for ranks in groups {
        let record = String::from_utf8_lossy(&store.get(&record_key(ranks[0]))?).into_owned();
        records.push(Record { ranks, common: parsed(&record) });
    }
    store.add(COMPARED_KEY, 1)?;
    // Best effort: a store that is gone has no readers.
    until(Instant::now(), LAST_TO_COMPARE, POLL, || {
        let all = i64::try_from(world_size).unwrap_or(i64::MAX);
        store.add(COMPARED_KEY, 0).map_or(true, |compared| compared >= all).then_some(())
    });
    Ok(between(&records))
}

/// Settings that some ranks share.
struct Record {
    ranks: Vec<usize>,
    common: Vec<(String, String)>,
}

/// The differences between records.
fn between(records: &[Record]) -> Vec<Difference> {
    let mut names: Vec<&String> = Vec::new();
    for (name, _) in records.iter().flat_map(|record| &record.common) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    let difference = |name: &String| {
        let mut values: Vec<(Option<String>, Vec<usize>)> = Vec::new();
        for Record { ranks, common } in records {
            let found = common.iter().find(|(known, _)| known == name);
            let value = found.map(|(_, value)| value.clone());
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, others)) => others.extend(ranks),
                None => values.push((value, ranks.clone())),
            }
        }
        values.iter_mut().for_each(|(_, ranks)| ranks.sort_unstable());
        (values.len() > 1).then(|| Difference { name: name.clone(), values })
    };
    names.into_iter().filter_map(difference).collect()
}

fn record(common: &[(String, String)]) -> String {
    let texts = common.iter().flat_map(|(name, value)| [name, value]);
    texts.map(|text| text.replace(SEPARATOR, " ")).collect::<Vec<_>>().join("\0")
}

fn parsed(record: &str) -> Vec<(String, String)> {
    let texts: Vec<&str> = record.split(SEPARATOR).collect();
    let pair = |pair: &[&str]| Some(((*pair.first()?).to_owned(), (*pair.get(1)?).to_owned()));
    texts.chunks(2).filter_map(pair).collect()
}

/// FNV-1a, 64 bits, in hexadecimal digits: the same in every build.
fn digest(text: &str) -> String {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", text.bytes().fold(0xcbf2_9ce4_8422_2325, step))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    /// The differences between ranks with the settings `all`.
    fn found(all: &[&[(&str, &str)]]) -> Vec<String> {
        let store = Store::serve(([127, 0, 0, 1], 0), Duration::from_secs(20)).unwrap();
        let clients: Vec<Store> = all
            .iter()
            .map(|_| Store::connect("127.0.0.1", store.port(), Duration::from_secs(20)).unwrap())
            .collect();
        for (rank, own) in all.iter().enumerate() {
            sign_in(&store, rank, &common(own)).unwrap();
        }
        std::thread::scope(|scope| {
            let compare = |client| scope.spawn(move || differences(client, all.len()).unwrap());
            let ranks: Vec<_> = clients.iter().map(compare).collect();
            let mut answers: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
            answers.dedup();
            assert_eq!(answers.len(), 1, "all find the same");
            answers[0].iter().map(ToString::to_string).collect()
        })
    }

    #[test]
    fn equal_ranks_agree() {
        let own: &[(&str, &str)] = &[("--lr", "0.01"), ("--loss", "ce,kl=0.5")];
        assert!(found(&[own, own, own]).is_empty());
        assert!(found(&[&[], &[]]).is_empty());
    }

    #[test]
    fn a_difference_names_key_values_and_ranks() {
        let (a, b): (&[_], &[_]) =
            (&[("--lr", "0.01"), ("--seed", "0")], &[("--lr", "0.1"), ("--seed", "0")]);
        assert_eq!(found(&[a, b]), ["--lr is 0.01 on rank 0 and 0.1 on rank 1"]);
        assert_eq!(
            found(&[b, a, b, a, a, a]),
            ["--lr is 0.1 on ranks 0, 2 and 0.01 on ranks 1, 3-5"]
        );
        let c: &[_] = &[("--lr", "0.01"), ("--seed", "7"), ("--new", "x")];
        let three = found(&[a, b, c]);
        assert_eq!(three[0], "--lr is 0.01 on ranks 0, 2 and 0.1 on rank 1");
        assert_eq!(three[1], "--seed is 0 on ranks 0, 1 and 7 on rank 2");
        assert_eq!(three[2], "--new is unknown on ranks 0, 1 and x on rank 2");
    }

    #[test]
    fn a_digest_follows_the_text() {
        // The reference value of FNV-1a for "a".
        assert_eq!(digest("a"), "af63dc4c8601ec8c");
        assert_ne!(
            digest(&record(&common(&[("a", "b")]))),
            digest(&record(&common(&[("a", "c")])))
        );
        assert_eq!(parsed(&record(&common(&[("a", "x\0y")]))), common(&[("a", "x y")]));
    }
}
