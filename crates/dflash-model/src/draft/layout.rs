//! Where each parameter lies in the flat buffer, and views of such a buffer by role.

use tch::Tensor;

use super::config::DraftConfig;

/// Parameters start at multiples of this many elements, a cache line of float32. Matrices that are
/// multiplied as one (q, k, v and gate, up) lie side by side without a gap.
const ALIGNMENT: i64 = 16;

/// One named tensor of the checkpoint.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Debug)]
pub struct Parameter {
    pub name: String,
    pub shape: Vec<i64>,
    /// Its first element in the flat buffer.
    pub offset: i64,
}

impl Parameter {
    /// Number of elements.
    pub fn elements(&self) -> i64 {
        self.shape.iter().product()
    }

    /// Whether it is a matrix; the others are norm weights and biases.
    pub fn is_matrix(&self) -> bool {
        self.shape.len() > 1
    }

    /// Whether it is a bias, whose fresh value is zero.
    pub fn is_bias(&self) -> bool {
        self.name.ends_with(".bias")
    }

    /// Its view in a flat buffer.
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
}

impl DraftLayout {
    /// Lays out the parameters of `config`.
    pub fn new(config: &DraftConfig) -> Self {
        let mut layout = Self { parameters: Vec::new(), buckets: Vec::new(), elements: 0 };
        let h = config.hidden_size;
        layout.bucket(vec![
            ("fc.weight".into(), vec![h, config.captures() * h]),
            ("hidden_norm.weight".into(), vec![h]),
        ]);
        for index in 0..config.layers.len() {
            layout.bucket(layer_parameters(config, index));
        }
        layout.bucket(vec![("norm.weight".into(), vec![h])]);
        layout
    }

    /// In the order of the flat buffer.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Length of the flat buffer, padding included.
    pub fn elements(&self) -> i64 {
        self.elements
    }

    /// Number of trained parameters, padding excluded.
    pub fn trained(&self) -> i64 {
        self.parameters.iter().map(Parameter::elements).sum()
    }

    /// (offset, elements) of what becomes final together in the backward pass: first the fusion of
    /// the context, then each layer, last the final norm. The backward pass finishes them from the
    /// last to the first.
    pub fn buckets(&self) -> &[(i64, i64)] {
        &self.buckets
    }

    fn bucket(&mut self, parameters: Vec<(String, Vec<i64>)>) {
        let start = self.elements;
        for (name, shape) in parameters {
            let parameter = Parameter { name, shape, offset: self.elements };
            self.elements += parameter.elements();
            if !fused_with_next(&parameter.name) {
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

fn fused_with_next(name: &str) -> bool {
    let fused =
        ["q_proj.weight", "k_proj.weight", "gate_proj.weight", "q_proj.bias", "k_proj.bias"];
    fused.iter().any(|suffix| name.ends_with(suffix))
}

fn layer_parameters(config: &DraftConfig, index: usize) -> Vec<(String, Vec<i64>)> {
    let (h, d, i) = (config.hidden_size, config.head_dim, config.intermediate_size);
    let (q_width, kv_width) = (config.num_attention_heads * d, config.kv_width());
    let weights = [
        ("self_attn.q_proj", vec![q_width, h]),
        ("self_attn.k_proj", vec![kv_width, h]),
        ("self_attn.v_proj", vec![kv_width, h]),
        ("self_attn.o_proj", vec![h, q_width]),
        ("mlp.gate_proj", vec![i, h]),
        ("mlp.up_proj", vec![i, h]),
        ("mlp.down_proj", vec![h, i]),
        ("self_attn.q_norm", vec![d]),
        ("self_attn.k_norm", vec![d]),
        ("input_layernorm", vec![h]),
        ("post_attention_layernorm", vec![h]),
    ];
    let biases = [
        ("self_attn.q_proj", q_width),
        ("self_attn.k_proj", kv_width),
        ("self_attn.v_proj", kv_width),
        ("self_attn.o_proj", h),
    ];
    let named = |role: &str, kind: &str| format!("layers.{index}.{role}.{kind}");
    let weights = weights.into_iter().map(|(role, shape)| (named(role, "weight"), shape));
    let biases = biases.into_iter().map(|(role, width)| (named(role, "bias"), vec![width]));
    weights.chain(biases.filter(|_| config.attention_bias)).collect()
}

/// The biases of a layer's attention, or their gradients, as views of a flat buffer.
#[derive(Debug)]
pub struct BiasViews {
    /// Of q, k and v: [(heads + 2 kv heads) * D].
    pub qkv: Tensor,
    /// The part of `qkv` that is of k and v, for the context too.
    pub kv: Tensor,
    /// `[H]`.
    pub o: Tensor,
}

/// One layer's weights or gradients by role, as views of a flat buffer.
#[derive(Debug)]
pub struct LayerViews {
    /// Where the attention's projections add biases.
    pub biases: Option<BiasViews>,
    /// q, k and v stacked: [(heads + 2 kv heads) * D, H].
    pub qkv: Tensor,
    /// The k and v rows of `qkv`, which project the context.
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
    /// One entry a layer.
    pub layers: Vec<LayerViews>,
    /// `[H]`.
    pub norm: Tensor,
}

impl DraftViews {
    /// Views of `flat`, which may hold weights or gradients.
    pub fn new(config: &DraftConfig, layout: &DraftLayout, flat: &Tensor) -> Self {
        let view = |name: &str| layout.find(name).view(flat);
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
        }
    }
}
