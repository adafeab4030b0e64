// The files that only hand calls on to libtorch, compiled as one: its headers take the compiler
// seconds for each file, and their lines take it none.
#include "device.cpp"
#include "flash.cpp"
#include "interval.cpp"
#include "level.cpp"
#include "staging.cpp"
