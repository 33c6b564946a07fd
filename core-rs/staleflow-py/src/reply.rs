//! What a vLLM server answers to a request, parsed off the event loop.
//!
//! A reply of 20,000 tokens is megabytes of JSON. It is parsed with the interpreter lock released, into one array per
//! quantity; the lock is held only while these become Python lists, and given up between them.

use std::fmt;

use pyo3::prelude::*;
use pyo3::types::PyList;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};

use crate::errors::ErrorClass;

/// What the server sends for a logprob that is not a number or minus infinity.
const NO_LOGPROB: f64 = -9999.0;

/// Rounding in float32 can lift the logprob of a certain token this much above zero.
const ROUNDING: f64 = 1e-4;

/// One choice of a reply, in the fields that both endpoints share.
#[pyclass(frozen, get_all, module = "staleflow._core")]
pub(crate) struct EngineReply {
    request_id: String,
    finish_reason: String,
    token_ids: Py<PyList>,
    logprobs: Py<PyList>,
    weight_versions: Option<Vec<(String, u64, u64)>>,
    prompt_logprobs: Py<PyList>,
}

#[pymethods]
impl EngineReply {
    fn __repr__(&self, py: Python<'_>) -> String {
        let Self { request_id, finish_reason, token_ids, .. } = self;
        let tokens = token_ids.bind(py).len();
        format!("EngineReply(request_id={request_id:?}, finish_reason={finish_reason:?}, {tokens} tokens)")
    }
}

/// Parses a reply of `/inference/v1/generate` or `/v1/completions`. With `prompt`, the reply must tell the logprob of
/// each of its tokens after the first.
#[pyfunction]
#[pyo3(signature = (body, prompt = None))]
pub(crate) fn decode_reply(py: Python<'_>, body: &[u8], prompt: Option<Vec<u32>>) -> PyResult<EngineReply> {
    let parsed = py.detach(|| Tokens::parse(body, prompt.as_deref()));
    let tokens = parsed.map_err(|wrong| ErrorClass::EngineReply.error(wrong))?;
    let token_ids = list(py, &tokens.ids)?;
    let logprobs = list(py, &tokens.logprobs)?;
    let prompt_logprobs = list(py, &tokens.prompt_logprobs)?;
    Ok(EngineReply {
        request_id: tokens.request_id,
        finish_reason: tokens.finish_reason,
        token_ids,
        logprobs,
        weight_versions: tokens.versions,
        prompt_logprobs,
    })
}

/// The position of the first token whose logprob is not that of a probability, whose version is not within bounds, or
/// whose version is older than the one before it. Both lists are of one length.
#[pyfunction]
pub(crate) fn first_malformed_token(
    logprobs: Vec<f64>,
    versions: Vec<i64>,
    oldest: i64,
    published: i64,
) -> Option<usize> {
    let mut newest = oldest;
    logprobs.into_iter().zip(versions).position(|(logprob, version)| {
        let well_formed =
            logprob.is_finite() && logprob <= ROUNDING && newest <= version && version <= published;
        newest = version;
        !well_formed
    })
}

/// A Python list, after whoever waits for the interpreter has had a turn.
fn list<'py, T>(py: Python<'py>, items: &[T]) -> PyResult<Py<PyList>>
where
    T: Copy + IntoPyObject<'py>,
{
    py.detach(std::thread::yield_now);
    Ok(PyList::new(py, items.iter().copied())?.unbind())
}

/// A reply that makes sense in itself.
struct Tokens {
    request_id: String,
    finish_reason: String,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
    versions: Option<Vec<(String, u64, u64)>>,
    prompt_logprobs: Vec<f64>,
}

impl Tokens {
    fn parse(body: &[u8], prompt: Option<&[u32]>) -> Result<Self, String> {
        let reply: Reply = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let choices = reply.choices.len();
        let [choice] = <[Choice; 1]>::try_from(reply.choices)
            .map_err(|_| format!("it has {choices} choices; one was asked for"))?;
        let ids = choice.token_ids.ok_or("it has no token_ids")?;
        let logprobs = choice.logprobs.unwrap_or_default().of(&ids)?;
        let prompt_logprobs = match prompt {
            Some(prompt) if !ids.is_empty() => {
                of_prompt(prompt, reply.prompt_logprobs.or(choice.prompt_logprobs))?
            }
            // A request that is aborted before its prefill has none.
            _ => Vec::new(),
        };
        let versions = choice
            .weight_versions
            .map(|spans| spans.into_iter().map(|span| (span.version, span.start, span.end)).collect());
        Ok(Self {
            request_id: reply.request_id,
            finish_reason: choice.finish_reason.ok_or("it does not say why it ends")?,
            ids,
            logprobs,
            versions,
            prompt_logprobs,
        })
    }
}

#[derive(Deserialize)]
struct Reply {
    #[serde(alias = "id")]
    request_id: String,
    choices: Vec<Choice>,
    prompt_logprobs: Option<Vec<Option<Candidates>>>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    logprobs: Option<Logprobs>,
    finish_reason: Option<String>,
    weight_versions: Option<Vec<Span>>,
    prompt_logprobs: Option<Vec<Option<Candidates>>>,
}

/// `content` is of the one endpoint, `token_logprobs` of the other.
#[derive(Default, Deserialize)]
struct Logprobs {
    content: Option<Vec<Content>>,
    token_logprobs: Option<Vec<Option<f64>>>,
}

#[derive(Deserialize)]
struct Content {
    token_id: u32,
    logprob: f64,
}

/// Tokens `start` to `end`, excluding `end`, were sampled by weights of this name.
#[derive(Deserialize)]
struct Span {
    version: String,
    start: u64,
    end: u64,
}

impl Logprobs {
    /// One logprob for each of these tokens.
    fn of(self, ids: &[u32]) -> Result<Vec<f64>, String> {
        let (named, logprobs): (Option<Vec<u32>>, Vec<f64>) = match (self.content, self.token_logprobs) {
            (Some(content), _) => {
                let (ids, logprobs) =
                    content.into_iter().map(|token| (token.token_id, token.logprob)).unzip();
                (Some(ids), logprobs)
            }
            (None, Some(logprobs)) => {
                (None, logprobs.into_iter().map(|logprob| logprob.unwrap_or(NO_LOGPROB)).collect())
            }
            (None, None) => (None, Vec::new()),
        };
        if logprobs.len() != ids.len() {
            return Err(format!("it has {} token_ids and {} logprobs", ids.len(), logprobs.len()));
        }
        if let Some(position) = named.and_then(|named| named.iter().zip(ids).position(|(a, b)| a != b)) {
            return Err(format!("the logprob at token {position} is of another token"));
        }
        if let Some(position) = logprobs.iter().position(|logprob| *logprob <= NO_LOGPROB) {
            return Err(format!("token {position} has no logprob"));
        }
        Ok(logprobs)
    }
}

/// Of each token of the prompt after the first.
fn of_prompt(prompt: &[u32], candidates: Option<Vec<Option<Candidates>>>) -> Result<Vec<f64>, String> {
    let candidates = candidates.ok_or("it has no prompt_logprobs")?;
    if candidates.len() != prompt.len() {
        let (found, wanted) = (candidates.len(), prompt.len());
        return Err(format!("it has prompt_logprobs of {found} tokens; the prompt has {wanted}"));
    }
    let of_token = |(position, (token, candidates)): (usize, (&u32, Option<Candidates>))| {
        candidates
            .and_then(|Candidates(found)| found.into_iter().find(|(id, _)| id == token))
            .map(|(_, logprob)| logprob)
            .ok_or_else(|| format!("token {position} of the prompt has no logprob"))
    };
    prompt.iter().zip(candidates).enumerate().skip(1).map(of_token).collect()
}

/// Logprobs by token id: the object that the server sends for one token of the prompt.
struct Candidates(Vec<(u32, f64)>);

#[derive(Deserialize)]
struct Candidate {
    logprob: f64,
}

impl<'de> Deserialize<'de> for Candidates {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(CandidatesVisitor)
    }
}

struct CandidatesVisitor;

impl<'de> Visitor<'de> for CandidatesVisitor {
    type Value = Candidates;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("logprobs by token id")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Candidates, A::Error> {
        let mut found = Vec::with_capacity(1);
        while let Some((id, candidate)) = map.next_entry::<u32, Candidate>()? {
            found.push((id, candidate.logprob));
        }
        Ok(Candidates(found))
    }
}
