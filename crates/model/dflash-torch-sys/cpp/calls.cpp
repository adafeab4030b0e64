// Thin wrappers of libtorch calls in one file: parsing libtorch's headers takes seconds each time.
#include "device.cpp"
#include "flash.cpp"
#include "interval.cpp"
#include "level.cpp"
#include "staging.cpp"
