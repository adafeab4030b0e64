//! Memory-mapped tensor files, copied directly to the target device.
//!
//! Copies read from the page cache, so no data is held twice, and a piece's pages are released
//! after it is copied. Before each piece the kernel is asked to load its pages
//! (`MADV_POPULATE_READ`): if the file shrank or the disk fails, this returns an error where a
//! plain access would kill the process.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::Range;

use memmap2::{Advice, Mmap, UncheckedAdvice};
use tch::{Device, Kind, TchError, Tensor};

/// A mapped file.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    file: File,
}

/// A tensor in a mapped file: contiguous, little-endian, row-major.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// Byte offset in the file.
    pub offset: usize,
    /// Type of its elements.
    pub kind: Kind,
    /// Its shape.
    pub shape: &'a [i64],
}

/// Why copying from a mapped file failed.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The file shrank, or the disk failed.
    #[error(transparent)]
    File(#[from] io::Error),
    /// libtorch is out of memory or cannot convert.
    #[error(transparent)]
    Torch(#[from] TchError),
}

impl MappedFile {
    /// Maps the whole file.
    ///
    /// # Errors
    /// The operating system's error.
    pub fn new(file: File) -> io::Result<Self> {
        // SAFETY: if another process changes the file, the values read change, and any bit pattern
        // is valid. Pages that a truncated file no longer has are not touched: see `present`.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self { map, file })
    }

    /// Copies a slice of `stored` into `destination`, of any type, device and strides. The slice
    /// starts at `start` in dimension `dim`, is as long as the destination there, and spans all
    /// other dimensions. About `piece` elements are processed at a time.
    ///
    /// # Errors
    /// [`CopyError`].
    ///
    /// # Panics
    /// If the tensor or the slice is out of bounds.
    pub fn copy_part(
        &self,
        stored: Stored<'_>,
        dim: i64,
        start: i64,
        destination: &Tensor,
        piece: i64,
    ) -> Result<(), CopyError> {
        if destination.numel() == 0 {
            return Ok(());
        }
        let width = stored.kind.elt_size_in_bytes();
        let elements: i64 = stored.shape.iter().product();
        let bytes = &self.map[stored.offset..stored.offset + elements as usize * width];
        // Data may start at any offset, since headers have any length.
        if !(bytes.as_ptr() as usize).is_multiple_of(width) {
            return self.copy_unaligned(stored, dim, start, destination);
        }
        let mut strides = vec![1; stored.shape.len()];
        for dim in (1..strides.len()).rev() {
            strides[dim - 1] = strides[dim] * stored.shape[dim];
        }
        // SAFETY: these bytes stay mapped as long as `self`, which outlives the tensor. Nothing
        // writes to them.
        let whole = unsafe {
            Tensor::f_from_blob(bytes.as_ptr(), stored.shape, &strides, stored.kind, Device::Cpu)?
        };
        let part = match stored.shape {
            [] => whole,
            _ => whole.f_narrow(dim, start, destination.size()[dim as usize])?,
        };
        self.copy_pieces(&part, destination, piece)
    }

    fn copy_pieces(&self, source: &Tensor, target: &Tensor, piece: i64) -> Result<(), CopyError> {
        let rows = source.size().first().copied().unwrap_or(1);
        if rows == 1 && source.dim() > 1 {
            return self.copy_pieces(&source.f_select(0, 0)?, &target.f_select(0, 0)?, piece);
        }
        if span(source) <= piece || source.dim() == 0 {
            return self.copy_piece(source, target);
        }
        let at_once = (piece / source.stride()[0]).max(1);
        for row in (0..rows).step_by(at_once as usize) {
            let part = |whole: &Tensor| whole.f_narrow(0, row, at_once.min(rows - row));
            let (source, target) = (part(source)?, part(target)?);
            match at_once {
                1 => self.copy_pieces(&source, &target, piece)?,
                _ => self.copy_piece(&source, &target)?,
            }
        }
        Ok(())
    }

    fn copy_piece(&self, source: &Tensor, target: &Tensor) -> Result<(), CopyError> {
        let start = source.data_ptr() as usize - self.map.as_ptr() as usize;
        let bytes = start..start + span(source) as usize * source.kind().elt_size_in_bytes();
        self.present(bytes.clone())?;
        if is_turned(target) {
            // Transposed in cache first and then copied row by row: writing single elements a row
            // apart takes several times as long.
            let turned = source.f_contiguous()?.f_tr()?.f_contiguous()?;
            target.f_tr()?.f_copy_(&turned)?;
        } else {
            target.shallow_clone().f_copy_(source)?;
        }
        self.let_go(bytes);
        Ok(())
    }

    /// Copies unaligned data, which only old files have, through a buffer.
    fn copy_unaligned(
        &self,
        stored: Stored<'_>,
        dim: i64,
        start: i64,
        destination: &Tensor,
    ) -> Result<(), CopyError> {
        let elements: i64 = stored.shape.iter().product();
        let length = elements as usize * stored.kind.elt_size_in_bytes();
        let bytes = stored.offset..stored.offset + length;
        self.present(bytes.clone())?;
        let whole = Tensor::f_from_data_size(&self.map[bytes.clone()], stored.shape, stored.kind)?;
        let part = match stored.shape {
            [] => whole,
            _ => whole.f_narrow(dim, start, destination.size()[dim as usize])?,
        };
        destination.shallow_clone().f_copy_(&part)?;
        self.let_go(bytes);
        Ok(())
    }

    /// Loads pages into memory. The kernel reports a truncated file or a failing disk, where a
    /// plain access would kill the process.
    fn present(&self, bytes: Range<usize>) -> io::Result<()> {
        let length = self.file.metadata()?.len();
        if length < bytes.end as u64 {
            let text = format!("it has become shorter: {length} bytes of at least {}", bytes.end);
            return Err(io::Error::new(ErrorKind::UnexpectedEof, text));
        }
        match self.map.advise_range(Advice::PopulateRead, bytes.start, bytes.len()) {
            // Kernels before 5.14 do not support it.
            Err(error) if error.kind() == ErrorKind::InvalidInput => Ok(()),
            outcome => outcome,
        }
    }

    /// Releases pages; the system may keep them in its cache.
    fn let_go(&self, bytes: Range<usize>) {
        // SAFETY: a file mapping that is never written: released pages are read again unchanged.
        let _ = unsafe {
            self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len())
        };
    }
}

/// Whether a CPU matrix is column-major.
fn is_turned(target: &Tensor) -> bool {
    target.device() == Device::Cpu
        && target.dim() == 2
        && target.stride()[0] == 1
        && target.stride()[1] > 1
}

/// Number of elements between the first and the last, including gaps.
fn span(tensor: &Tensor) -> i64 {
    let reach = tensor.size().into_iter().zip(tensor.stride());
    1 + reach.map(|(size, stride)| (size - 1) * stride).sum::<i64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of `ahead` bytes followed by these numbers.
    fn mapped(ahead: usize, numbers: &[f32]) -> (tempfile::NamedTempFile, MappedFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let numbers = numbers.iter().flat_map(|number| number.to_le_bytes());
        let bytes: Vec<u8> = std::iter::repeat_n(7, ahead).chain(numbers).collect();
        std::fs::write(file.path(), bytes).unwrap();
        let map = MappedFile::new(File::open(file.path()).unwrap()).unwrap();
        (file, map)
    }

    #[test]
    fn every_part_comes_as_it_is_in_pieces_of_any_length() {
        let numbers: Vec<f32> = (0..5 * 6 * 7).map(|number| number as f32).collect();
        let whole = Tensor::from_slice(&numbers).view([5, 6, 7]);
        for ahead in [0, 8, 3] {
            let (_file, map) = mapped(ahead, &numbers);
            let stored = Stored { offset: ahead, kind: Kind::Float, shape: &[5, 6, 7] };
            for (dim, start, length) in [(0, 0, 5), (0, 2, 2), (1, 3, 3), (2, 1, 4), (2, 6, 1)] {
                let expected = whole.narrow(dim, start, length);
                for piece in [1, 4, 7, 50, 1000] {
                    let target = expected.zeros_like().to_kind(Kind::Double);
                    let target = target.transpose(1, 2).contiguous().transpose(1, 2);
                    map.copy_part(stored, dim, start, &target, piece).unwrap();
                    assert_eq!(target, expected.to_kind(Kind::Double), "{ahead} {dim} {piece}");
                }
            }
        }
        let (_file, map) = mapped(0, &[3.5]);
        let scalar = Tensor::zeros([], (Kind::Float, Device::Cpu));
        map.copy_part(Stored { offset: 0, kind: Kind::Float, shape: &[] }, 0, 0, &scalar, 9)
            .unwrap();
        assert_eq!(scalar.double_value(&[]), 3.5);
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let numbers = vec![1.0; 1 << 16];
        let (file, map) = mapped(0, &numbers);
        let target = Tensor::zeros([1 << 16], (Kind::Float, Device::Cpu));
        let stored = Stored { offset: 0, kind: Kind::Float, shape: &[1 << 16] };
        map.copy_part(stored, 0, 0, &target, 1 << 10).unwrap();
        file.as_file().set_len(100).unwrap();
        let error = map.copy_part(stored, 0, 0, &target, 1 << 10).unwrap_err();
        assert!(error.to_string().contains("it has become shorter: 100 bytes"), "{error}");
        // Without the length check the kernel reports it.
        let refused = map.map.advise_range(Advice::PopulateRead, 1 << 14, 100);
        assert!(refused.is_err());
    }
}
