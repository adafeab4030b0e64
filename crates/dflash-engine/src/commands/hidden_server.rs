//! `dflash hidden-server`: arguments to settings to one library call.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use dflash::args::{ComputeDtype, HiddenServerArgs, HiddenServerSettings, WireDtype};
use dflash_hidden::Dtype;
use dflash_hidden_server::{
    Loader, Ready, ServerConfig, TargetFeaturizer, TargetFeaturizerOptions, serve,
};
use tch::{Cuda, Device, Kind};

/// Runs the command.
pub(crate) fn run(args: HiddenServerArgs, stop: &Arc<AtomicBool>) -> anyhow::Result<()> {
    let HiddenServerSettings {
        model,
        target_layer_ids,
        host,
        port,
        port_file,
        device,
        dtype,
        wire_dtype,
        max_queue,
        max_batch_tokens,
        max_model_len,
        threads,
        notes,
    } = args.resolve()?;
    for note in notes {
        tracing::warn!("{note}");
    }
    let options = TargetFeaturizerOptions {
        dir: model,
        layer_ids: target_layer_ids,
        device: device.as_deref().map(parse_device).transpose()?,
        kind: match dtype {
            ComputeDtype::Auto => None,
            ComputeDtype::Bfloat16 => Some(Kind::BFloat16),
            ComputeDtype::Float32 => Some(Kind::Float),
        },
        wire_dtype: match wire_dtype {
            WireDtype::Bf16 => Dtype::Bf16,
            WireDtype::F32 => Dtype::F32,
        },
        max_model_len,
        threads,
    };
    let config = ServerConfig { host, port, port_file, max_queue, max_batch_tokens };
    tracing::info!("loading {}", options.dir.display());
    let load: Loader = Box::new(move || Ok(Box::new(TargetFeaturizer::load(&options)?)));
    // Not a log line: it must be seen whatever the log level.
    serve(&config, load, stop, |ready: &Ready| eprintln!("dflash hidden-server {ready}"))?;
    Ok(())
}

/// `cpu`, `cuda` or `cuda:N`, checked against what libtorch has.
fn parse_device(text: &str) -> anyhow::Result<Device> {
    let index = match text.split_once(':') {
        None if text == "cpu" => return Ok(Device::Cpu),
        None if text == "cuda" => Some(0),
        Some(("cuda", index)) => index.parse().ok(),
        _ => None,
    };
    let Some(index) = index else { bail!("--device {text}: pass cpu, cuda or cuda:N") };
    let devices = Cuda::device_count().max(0) as usize;
    if index >= devices {
        bail!("--device {text}: libtorch sees {devices} CUDA devices here; pass --device cpu");
    }
    Ok(Device::Cuda(index))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_or_refused() {
        assert_eq!(parse_device("cpu").unwrap(), Device::Cpu);
        let refusal = |text| parse_device(text).unwrap_err().to_string();
        assert!(refusal("gpu").contains("pass cpu, cuda or cuda:N"));
        assert!(refusal("cuda:x").contains("pass cpu"));
        assert!(refusal("cuda:99").contains("CUDA devices here"));
    }
}
