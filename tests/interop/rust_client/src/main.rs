//! Drives a RawKV cluster with tikv-client, the Rust client of the TiKV project.
//!
//! ```text
//! rust_client PD_ADDRESS [KEYSPACE]        KEYSPACE: the name of an API V2 keyspace; without it the cluster has API V1
//! ```
//!
//! It reads one request a line from standard input and answers each with one line, both JSON, bytes in base64: the
//! protocol of `tests/interop/client_go/main.go`, without checksums, which this client does not have.

use std::io::{BufRead, Write};

use base64::{engine::general_purpose::STANDARD, Engine};
use serde::Deserialize;
use serde_json::{json, Value};
use tikv_client::{BoundRange, Config, Key, KvPair, RawClient};

type Failure = Box<dyn std::error::Error>;

/// The arguments of all operations; each takes those it needs.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Request {
    op: String,
    key: String,
    value: String,
    previous: Option<String>,
    ttl: u64,
    start: String,
    end: String,
    limit: u32,
    keys_only: bool,
    keys: Vec<String>,
    values: Vec<String>,
    ttls: Option<Vec<u64>>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (pd, keyspace) = match arguments.as_slice() {
        [pd] => (pd, None),
        [pd, keyspace] => (pd, Some(keyspace)),
        _ => return Err("usage: rust_client PD_ADDRESS [KEYSPACE]".into()),
    };
    let config = keyspace.map_or_else(Config::default, |name| Config::default().with_keyspace(name));
    let client = RawClient::new_with_config(vec![pd.as_str()], config).await?;
    for line in std::io::stdin().lock().lines() {
        let request: Request = serde_json::from_str(&line?)?;
        let answer = match perform(&client, &request).await {
            Ok(answer) => answer,
            Err(error) => json!({"error": error.to_string()}),
        };
        let mut output = std::io::stdout().lock();
        writeln!(output, "{answer}")?;
        output.flush()?;
    }
    Ok(())
}

async fn perform(client: &RawClient, asked: &Request) -> Result<Value, Failure> {
    match asked.op.as_str() {
        "put" => client.put_with_ttl(bytes(&asked.key)?, bytes(&asked.value)?, asked.ttl).await?,
        "batch_put" => batch_put(client, asked).await?,
        "get" => {
            let value = client.get(bytes(&asked.key)?).await?;
            return Ok(json!({"value": value.map(|value| text(&value))}));
        }
        "batch_get" => return batch_get(client, asked).await,
        "ttl" => return Ok(json!({"ttl": client.get_key_ttl_secs(bytes(&asked.key)?).await?})),
        "delete" => client.delete(bytes(&asked.key)?).await?,
        "batch_delete" => client.batch_delete(all_bytes(&asked.keys)?).await?,
        "delete_range" => client.delete_range(range(&asked.start, &asked.end)?).await?,
        "scan" => {
            let pairs = if asked.keys_only {
                let keys = client.scan_keys(range(&asked.start, &asked.end)?, asked.limit).await?;
                keys.into_iter().map(|key| KvPair::new(key, Vec::new())).collect()
            } else {
                client.scan(range(&asked.start, &asked.end)?, asked.limit).await?
            };
            return Ok(rows(pairs));
        }
        // Of a reverse scan `start` is the upper end.
        "reverse_scan" => {
            let pairs = client.scan_reverse(range(&asked.end, &asked.start)?, asked.limit).await?;
            return Ok(rows(pairs));
        }
        "cas" => return compare_and_swap(client, asked).await,
        other => return Err(format!("no such operation: {other}").into()),
    }
    Ok(json!({}))
}

async fn batch_put(client: &RawClient, asked: &Request) -> Result<(), Failure> {
    let pairs: Vec<KvPair> = all_bytes(&asked.keys)?
        .into_iter()
        .zip(all_bytes(&asked.values)?)
        .map(|(key, value)| KvPair::new(key, value))
        .collect();
    let ttls = asked.ttls.clone().unwrap_or_else(|| vec![0; pairs.len()]);
    Ok(client.batch_put_with_ttl(pairs, ttls).await?)
}

async fn batch_get(client: &RawClient, asked: &Request) -> Result<Value, Failure> {
    let keys = all_bytes(&asked.keys)?;
    let found: std::collections::HashMap<Key, Vec<u8>> =
        client.batch_get(keys.clone()).await?.into_iter().map(|KvPair(key, value)| (key, value)).collect();
    let values: Vec<Option<String>> =
        keys.into_iter().map(|key| found.get(&Key::from(key)).map(|value| text(value))).collect();
    Ok(json!({"values": values}))
}

async fn compare_and_swap(client: &RawClient, asked: &Request) -> Result<Value, Failure> {
    let expected = asked.previous.as_deref().map(bytes).transpose()?;
    let (previous, swapped) =
        client.with_atomic_for_cas().compare_and_swap(bytes(&asked.key)?, expected, bytes(&asked.value)?).await?;
    Ok(json!({"previous": previous.map(|value| text(&value)), "swapped": swapped}))
}

/// A range whose end is exclusive, and no end where it is empty.
fn range(start: &str, end: &str) -> Result<BoundRange, Failure> {
    let (start, end) = (Key::from(bytes(start)?), Key::from(bytes(end)?));
    Ok(if end.is_empty() { (start..).into() } else { (start..end).into() })
}

fn rows(pairs: Vec<KvPair>) -> Value {
    let (keys, values): (Vec<String>, Vec<String>) =
        pairs.iter().map(|KvPair(key, value)| (text(<&[u8]>::from(key)), text(value))).unzip();
    json!({"keys": keys, "values": values})
}

fn bytes(text: &str) -> Result<Vec<u8>, Failure> {
    Ok(STANDARD.decode(text)?)
}

fn all_bytes(texts: &[String]) -> Result<Vec<Vec<u8>>, Failure> {
    texts.iter().map(|text| bytes(text)).collect()
}

fn text(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}
