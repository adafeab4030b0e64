// Instruction-set levels, in the order of `dflash_cpu::CpuLevel`.
#pragma once

#include <cstdint>

enum class DflashLevel : int32_t { kBaseline, kAvx2, kAvx512, kAvx512bf16, kNeon };
