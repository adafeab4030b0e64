//! Why a source's states are not those that the run expects, with the remedy.

/// The interpretation of the states that fits, or another defect.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Cause {
    /// The states are after the final norm, and no log-probabilities verify that.
    Normed,
    /// The source's norm uses weight 1 + w where the head uses w (1), or the reverse (-1).
    NormWeight(i8),
    /// The source uses the embedding as its lm_head.
    Tied,
    /// Ratio of the source's logits to the head's.
    LogitScale(f64),
    /// Soft cap of the source's logits; `None` if it applies none.
    Capped(Option<f64>),
    /// The last states are those labelled as this layer.
    LastIs(u32),
    /// States are shifted by one position: towards the end (1) or the beginning (-1).
    Shifted(i64),
    /// The last states come from an earlier layer than the target's last.
    EarlierLayer { last: u32, correlation: f64 },
    /// Ratio of the states of layer 0 to the embedding.
    EmbeddingScale(f64),
    /// The states labelled as this layer are the embedding's output.
    EmbeddingIs(u32),
    /// The states of layer 0 are not the embedding's output.
    OtherEmbedding { apart: f64 },
    /// The source has a token that the target lacks.
    Vocabulary { token: i64, rows: i64 },
    /// The source's tokenizer decodes a token differently.
    Tokenizer { token: i64, theirs: String, ours: String },
    /// No interpretation fits.
    Unknown(String),
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Normed => f.write_str(
                "the final norm is already applied to its last states: the loss says so, and it reports no log-probabilities that confirm it; make it return the states before the norm, or log-probabilities, with which this is accepted as it is",
            ),
            Self::NormWeight(sign) => norm_weight(f, *sign),
            Self::Tied => f.write_str(
                "it projects with the embedding, and --target has an lm_head of its own: compare \
                 tie_word_embeddings of both config.json",
            ),
            Self::LogitScale(scale) => write!(
                f,
                "its logits are {scale:.4} times those of --target: the logit scale is wrong on one \
                 side; compare logits_scaling or logit_scale of both config.json, or state logit_scale \
                 in a --target-spec"
            ),
            Self::Capped(cap) => capped(f, *cap),
            Self::LastIs(id) => write!(
                f,
                "what is assumed to be layer {id} is the last layer's output: its layer ids are not \
                 those of --target-layer-ids; start vLLM with eagle_aux_hidden_state_layer_ids of \
                 the same ids, ascending, and the number of layers last"
            ),
            Self::Shifted(by) => write!(
                f,
                "its states are those of the position {}: it puts another token first, such as a begin-of-text token; make it use token ids unchanged (add_special_tokens false)",
                if *by > 0 { "before" } else { "after" }
            ),
            Self::EarlierLayer { last, correlation } => earlier_layer(f, *last, *correlation),
            Self::EmbeddingScale(scale) => write!(
                f,
                "its embedding's output is {scale:.4} times that of --target: the embedding's scale \
                 is wrong on one side; compare `architectures` and embedding_multiplier of both \
                 config.json, or state embedding_scale in a --target-spec"
            ),
            Self::EmbeddingIs(id) => write!(
                f,
                "what is assumed to be layer {id} is the embedding's output, layer 0: its layer ids are \
                 not those of --target-layer-ids; start vLLM with eagle_aux_hidden_state_layer_ids \
                 of the same ids, ascending"
            ),
            Self::OtherEmbedding { apart } => write!(
                f,
                "what is assumed to be layer 0 is not the embedding's output of --target (they differ by \
                 {apart:.2} of its size): other layer ids (vLLM counts layers that have run: 0 is \
                 the embedding), or another model"
            ),
            Self::Vocabulary { token, rows } => write!(
                f,
                "it reports a log-probability of token {token}, and the target's embedding has \
                 {rows} rows: it serves a model of another vocabulary; start it with --target"
            ),
            Self::Tokenizer { token, theirs, ours } => write!(
                f,
                "it reads token {token} as {theirs:?}, and the target's tokenizer as {ours:?}: \
                 it serves a model of another tokenizer; start it with --target"
            ),
            Self::Unknown(how) => write!(
                f,
                "{how}, and no other interpretation of them fits (after the final norm, another norm \
                 weight, scale, cap, layer or position): it serves another model; start it with the \
                 files of --target"
            ),
        }
    }
}

fn norm_weight(f: &mut std::fmt::Formatter<'_>, sign: i8) -> std::fmt::Result {
    let (theirs, ours) = if sign > 0 { ("1 + w", "w") } else { ("w", "1 + w") };
    write!(
        f,
        "its final norm multiplies by {theirs}, and that of --target by {ours}: the norm's kind is \
         wrong on one side; compare `architectures` of both config.json, or state norm_kind in a \
         --target-spec"
    )
}

fn capped(f: &mut std::fmt::Formatter<'_>, cap: Option<f64>) -> std::fmt::Result {
    let theirs =
        cap.map_or("does not cap its logits".to_owned(), |cap| format!("caps its logits at {cap}"));
    write!(
        f,
        "it {theirs}, and --target otherwise: compare final_logit_softcapping of both config.json, \
         or state it in a --target-spec"
    )
}

fn earlier_layer(f: &mut std::fmt::Formatter<'_>, last: u32, correlation: f64) -> std::fmt::Result {
    write!(
        f,
        "the states assumed to be those of the last layer, {last}, give log-probabilities like the \
         target's (correlation {correlation:.2}) and not those: they are of an earlier layer, or of \
         the target in another form. vLLM counts layers that have run: 0 is the embedding, {last} \
         the last; z-lab's ids are one lower. Start it with eagle_aux_hidden_state_layer_ids as \
         --target-layer-ids, and {last} last"
    )
}
