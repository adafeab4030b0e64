// Scratch memory sizes for the calls of `decode.cpp`.
#include "decode.h"
#include "decode/layout.h"

extern "C" {

int64_t dflash_decode_pass_scratch(const DflashPass* pass, int64_t threads) {
  return Scratch(*pass, threads - 1, may_divide_heads(*pass, threads)).size;
}

int64_t dflash_decode_context_scratch(const DflashContext* context, int64_t threads) {
  return ContextScratch(*context, threads - 1).size;
}

int64_t dflash_decode_head_scratch(const DflashHead* head, int64_t threads) {
  return HeadScratch(*head, threads - 1).size;
}
}
