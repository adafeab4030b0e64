#pragma once
// Present because ProcessGroupGloo.hpp includes it; the header uses nothing of it.
