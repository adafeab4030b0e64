//! Layout of the flat parameter buffer, and its views by role.

use std::ops::Deref;

use tch::Tensor;

use super::DraftConfig;
use super::head::{CHECKED_HEAD, HeadViews, head_config};

/// Alignment of parameters in elements: a cache line of float32. Fused matrices (q, k, v and gate,
/// up) are contiguous without a gap.
const ALIGNMENT: i64 = 16;

/// Role of a parameter, which determines how it is optimized and exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Weight of a product: weight decay applies, and Muon may update it.
    Matrix,
    /// Table indexed by token: updated by AdamW without weight decay.
    Embedding,
    /// Norm weight or bias: updated by AdamW with the norms' weight decay.
    Vector,
}

/// Initial value of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fresh {
    /// Normal distribution with this standard deviation.
    Normal(f64),
    /// Approximately the mean of the auxiliary layers: see `fresh_fc`.
    MeanOfAuxLayers,
    /// One.
    Ones,
    /// Zero.
    Zeros,
}

/// One named tensor of the checkpoint.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    pub name: String,
    pub shape: Vec<i64>,
    pub role: Role,
    pub fresh: Fresh,
    /// Whether it is fused with the next parameter, which follows without a gap.
    pub fused_with_next: bool,
}

impl ParameterSpec {
    /// A normally initialised matrix.
    pub fn matrix(name: impl Into<String>, shape: [i64; 2], deviation: f64) -> Self {
        Self::new(name, &shape, Role::Matrix, Fresh::Normal(deviation))
    }

    /// A table [tokens, width].
    pub fn embedding(name: impl Into<String>, shape: [i64; 2], fresh: Fresh) -> Self {
        Self::new(name, &shape, Role::Embedding, fresh)
    }

    /// The weight of a norm `[width]`.
    pub fn norm(name: impl Into<String>, width: i64) -> Self {
        Self::new(name, &[width], Role::Vector, Fresh::Ones)
    }

    /// A bias `[width]`.
    pub fn bias(name: impl Into<String>, width: i64) -> Self {
        Self::new(name, &[width], Role::Vector, Fresh::Zeros)
    }

    /// A parameter of any role.
    pub fn new(name: impl Into<String>, shape: &[i64], role: Role, fresh: Fresh) -> Self {
        Self { name: name.into(), shape: shape.into(), role, fresh, fused_with_next: false }
    }

    fn fused_with_next(self) -> Self {
        Self { fused_with_next: true, ..self }
    }

    /// Number of elements.
    pub fn elements(&self) -> i64 {
        self.shape.iter().product()
    }
}

/// A parameter and its offset in the flat buffer.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its description.
    pub spec: ParameterSpec,
    /// Its first element in the flat buffer.
    pub offset: i64,
}

impl Deref for Parameter {
    type Target = ParameterSpec;

    fn deref(&self) -> &ParameterSpec {
        &self.spec
    }
}

impl Parameter {
    /// Its view of a flat buffer.
    pub fn view(&self, flat: &Tensor) -> Tensor {
        flat.narrow(0, self.offset, self.elements()).view(self.shape.as_slice())
    }
}

/// Names, shapes and offsets of all parameters of a draft.
#[derive(Clone, Debug)]
pub struct DraftLayout {
    parameters: Vec<Parameter>,
    buckets: Vec<(i64, i64)>,
    elements: i64,
    /// Number of trunk parameters and buckets, which precede the head's.
    trunk: Trunk,
}

#[derive(Clone, Copy, Debug, Default)]
struct Trunk {
    parameters: usize,
    buckets: usize,
}

impl DraftLayout {
    /// Lays out the parameters of `config`.
    ///
    /// # Panics
    /// If its head was not checked: see [`super::check_head`].
    pub fn new(config: &DraftConfig) -> Self {
        let (parameters, buckets, trunk) = (Vec::new(), Vec::new(), Trunk::default());
        let mut layout = Self { parameters, buckets, elements: 0, trunk };
        let h = config.hidden_size;
        let fc = ParameterSpec {
            fresh: Fresh::MeanOfAuxLayers,
            ..ParameterSpec::matrix("fc.weight", [h, config.aux_layers() * h], 0.0)
        };
        layout.bucket(vec![fc, ParameterSpec::norm("hidden_norm.weight", h)]);
        for index in 0..config.layers.len() {
            layout.bucket(layer_parameters(config, index));
        }
        layout.bucket(vec![ParameterSpec::norm("norm.weight", h)]);
        let (parameters, buckets) = (layout.parameters.len(), layout.buckets.len());
        layout.trunk = Trunk { parameters, buckets };
        let head = head_config(config).expect(CHECKED_HEAD).parameters();
        if !head.is_empty() {
            layout.bucket(head);
        }
        layout
    }

    /// In the order of the flat buffer.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Length of the flat buffer, including padding.
    pub fn elements(&self) -> i64 {
        self.elements
    }

    /// Number of trained parameters, excluding padding.
    pub fn trained(&self) -> i64 {
        self.parameters.iter().map(|parameter| parameter.elements()).sum()
    }

    /// (offset, elements) of the groups that become final together in the backward pass: the
    /// context fusion, each layer, the final norm, and the head if it has parameters. The backward
    /// pass finishes them from last to first.
    pub fn buckets(&self) -> &[(i64, i64)] {
        &self.buckets
    }

    /// Number of trunk buckets; the head's follows them.
    pub(super) fn trunk_buckets(&self) -> usize {
        self.trunk.buckets
    }

    fn bucket(&mut self, parameters: Vec<ParameterSpec>) {
        let start = self.elements;
        for spec in parameters {
            let parameter = Parameter { spec, offset: self.elements };
            self.elements += parameter.elements();
            if !parameter.fused_with_next {
                self.elements = (self.elements + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            }
            self.parameters.push(parameter);
        }
        self.buckets.push((start, self.elements - start));
    }

    fn find(&self, name: &str) -> &Parameter {
        let found = self.parameters.iter().find(|parameter| parameter.name == name);
        found.expect("every name asked for is laid out")
    }
}

fn layer_parameters(config: &DraftConfig, index: usize) -> Vec<ParameterSpec> {
    let (h, d, i) = (config.hidden_size, config.head_dim, config.intermediate_size);
    let (q_width, kv_width) = (config.num_attention_heads * d, config.kv_width());
    let name = |part: &str| format!("layers.{index}.{part}");
    let matrix = |part: &str, shape| {
        let weight = name(part) + ".weight";
        ParameterSpec::matrix(weight, shape, config.initializer_range)
    };
    let norm = |part: &str, width| ParameterSpec::norm(name(part) + ".weight", width);
    let mut parameters = vec![
        matrix("self_attn.q_proj", [q_width, h]).fused_with_next(),
        matrix("self_attn.k_proj", [kv_width, h]).fused_with_next(),
        matrix("self_attn.v_proj", [kv_width, h]),
        matrix("self_attn.o_proj", [h, q_width]),
        matrix("mlp.gate_proj", [i, h]).fused_with_next(),
        matrix("mlp.up_proj", [i, h]),
        matrix("mlp.down_proj", [h, i]),
        norm("self_attn.q_norm", d),
        norm("self_attn.k_norm", d),
        norm("input_layernorm", h),
        norm("post_attention_layernorm", h),
    ];
    if config.attention_bias {
        let bias = |part: &str, width| ParameterSpec::bias(name(part) + ".bias", width);
        parameters.extend([
            bias("self_attn.q_proj", q_width).fused_with_next(),
            bias("self_attn.k_proj", kv_width).fused_with_next(),
            bias("self_attn.v_proj", kv_width),
            bias("self_attn.o_proj", h),
        ]);
    }
    parameters
}

/// Biases of a layer's attention, or their gradients, as views of a flat buffer.
#[derive(Debug)]
pub struct BiasViews {
    /// q, k and v: [(heads + 2 kv heads) * D].
    pub qkv: Tensor,
    /// The k and v part of `qkv`, also used for the context.
    pub kv: Tensor,
    /// `[H]`.
    pub o: Tensor,
}

/// A layer's weights or gradients by role, as views of a flat buffer.
#[derive(Debug)]
pub struct LayerViews {
    /// Attention biases, if any.
    pub biases: Option<BiasViews>,
    /// q, k and v stacked: [(heads + 2 kv heads) * D, H].
    pub qkv: Tensor,
    /// The k and v rows of `qkv`, which also project the context.
    pub kv: Tensor,
    /// [H, heads * D].
    pub o: Tensor,
    /// Gate and up stacked: [2I, H].
    pub gate_up: Tensor,
    /// [H, I].
    pub down: Tensor,
    /// `[D]`.
    pub q_norm: Tensor,
    /// `[D]`.
    pub k_norm: Tensor,
    /// `[H]`.
    pub input_norm: Tensor,
    /// `[H]`.
    pub post_norm: Tensor,
}

/// All weights or gradients by role, as views of a flat buffer.
#[derive(Debug)]
pub struct DraftViews {
    /// [H, K*H].
    pub fc: Tensor,
    /// `[H]`.
    pub hidden_norm: Tensor,
    /// One entry per layer.
    pub layers: Vec<LayerViews>,
    /// `[H]`.
    pub norm: Tensor,
    /// The head's weights or gradients.
    pub head: HeadViews,
}

impl DraftViews {
    /// Views of `flat`, which may hold weights or gradients.
    pub fn new(config: &DraftConfig, layout: &DraftLayout, flat: &Tensor) -> Self {
        let view = |name: &str| layout.find(name).view(flat);
        let head = &layout.parameters[layout.trunk.parameters..];
        let layers = (0..config.layers.len())
            .map(|index| {
                let name = |role: &str| format!("layers.{index}.{role}.weight");
                let at = |role: &str| view(&name(role));
                let h = config.hidden_size;
                let stacked = |role: &str, rows: i64| {
                    let first = layout.find(&name(role)).offset;
                    flat.narrow(0, first, rows * h).view([rows, h])
                };
                let q_rows = config.num_attention_heads * config.head_dim;
                let kv_rows = 2 * config.kv_width();
                let biases = config.attention_bias.then(|| {
                    let bias = |role: &str| layout.find(&format!("layers.{index}.{role}.bias"));
                    let first = bias("self_attn.q_proj").offset;
                    BiasViews {
                        qkv: flat.narrow(0, first, q_rows + kv_rows),
                        kv: flat.narrow(0, first + q_rows, kv_rows),
                        o: bias("self_attn.o_proj").view(flat),
                    }
                });
                LayerViews {
                    biases,
                    qkv: stacked("self_attn.q_proj", q_rows + kv_rows),
                    kv: stacked("self_attn.k_proj", kv_rows),
                    o: at("self_attn.o_proj"),
                    gate_up: stacked("mlp.gate_proj", 2 * config.intermediate_size),
                    down: at("mlp.down_proj"),
                    q_norm: at("self_attn.q_norm"),
                    k_norm: at("self_attn.k_norm"),
                    input_norm: at("input_layernorm"),
                    post_norm: at("post_attention_layernorm"),
                }
            })
            .collect();
        Self {
            fc: view("fc.weight"),
            hidden_norm: view("hidden_norm.weight"),
            layers,
            norm: view("norm.weight"),
            head: HeadViews::new(head.iter().map(|own| (own.name.clone(), own.view(flat)))),
        }
    }
}
