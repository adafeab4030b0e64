// Thin wrappers of libtorch calls in one translation unit: parsing libtorch's headers takes seconds
// per file.
#include "device.cpp"
#include "flash.cpp"
#include "interval.cpp"
#include "level.cpp"
#include "staging.cpp"
